// The linear layer y = x Wᵀ + b and the gradients of W and b (that of x is a matmul). Leading
// dimensions of x and y are rows.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// y[.., O] = x[.., I] · weight[O, I]ᵀ + bias[O]; without a bias, pass View{} (null shape). All of
/// one floating dtype.
size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y);
void linear(const View& x, const View& weight, const View& bias, const View& y,
            Workspace workspace);

/// dweight[O, I] = dyᵀ · x, stored; dweight may be f32 where dy and x are bf16.
size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight);
void linear_weight_gradient(const View& dy, const View& x, const View& dweight,
                            Workspace workspace);

/// dbias[O] = the sum of dy's rows, stored. Blocks of 64 rows are summed in row order, then the
/// blocks in order.
void linear_bias_gradient(const View& dy, const View& dbias);

/// Both of them.
size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight,
                                  const View& dbias);
void linear_gradients(const View& dy, const View& x, const View& dweight, const View& dbias,
                      Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Products are cuBLASLt's: see cuda::matmul.
namespace cuda {

size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y);
void linear(const Stream& stream, const View& x, const View& weight, const View& bias,
            const View& y, Workspace workspace);

size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight);
void linear_weight_gradient(const Stream& stream, const View& dy, const View& x,
                            const View& dweight, Workspace workspace);

/// The CPU's bits: the same sums in the same order.
size_t linear_bias_gradient_workspace(const View& dy, const View& dbias);
void linear_bias_gradient(const Stream& stream, const View& dy, const View& dbias,
                          Workspace workspace);

/// One product that adds up dy's rows on its way, where cuBLASLt knows it and the gradients are of
/// one dtype; the order of the bias's sum, and so its bits, are then cuBLASLt's, the same at every
/// run. Else the two above.
size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight,
                                  const View& dbias);
void linear_gradients(const Stream& stream, const View& dy, const View& x, const View& dweight,
                      const View& dbias, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
