// Products with each expert's matrix if parts have several experts, or few rows are used (kernels/experts.h): only the GPU knows how
// many, so the blocks of one kernel determine which rows they process. Deterministic: a tile's sums run over its rows in order.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda {

/// y[Q, .., R, O] = x[Q, .., R, I] weight[E, O, I]ᵀ + bias[E, O] (View{}: none) for the used rows; the others are zeros in y. x and y
/// are dense, the weight has any strides.
size_t part_linear_workspace(const View& counts, const View& x);
void part_linear(const Stream& stream, const View& x, const View& weight, const View& bias, const View& counts, const View& y,
                 Workspace workspace);
/// dweight[E, O, I] = dyᵀ x of each expert's rows, in the dtype of dweight: that of x or, for narrow types, f32. dy and x dense.
size_t part_weight_gradient_workspace(const View& counts, const View& x);
void part_weight_gradient(const Stream& stream, const View& dy, const View& x, const View& counts, const View& dweight,
                          Workspace workspace);
/// dbias[E, O] likewise: the sums of each expert's rows of dy. Both dense.
size_t part_bias_gradient_workspace(const View& counts, const View& dy);
void part_bias_gradient(const Stream& stream, const View& dy, const View& counts, const View& dbias, Workspace workspace);
/// y += bias[E, O] of each row's expert, for the used rows; rows are dense along O.
void add_expert_bias(const Stream& stream, const View& bias, const View& counts, const View& y);

}  // namespace sheaf::kernels::cuda
