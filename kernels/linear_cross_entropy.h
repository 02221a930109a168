// The language-model head and its loss as one kernel: logits = x Wᵀ exist for a chunk of rows at a
// time only.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

/// Rows whose logits exist at the same time: about 64 MB of them, 64 to 2,048 rows. A function of
/// the vocabulary alone.
int64_t linear_cross_entropy_chunk(int64_t vocabulary);

/// loss[] = the sum over rows of cross-entropy(x[.., C] · weight[V, C]ᵀ, targets[..]); rows whose
/// target is ignore_index count 0; another target outside [0, V) is a DataError. Row losses in f32
/// are summed in row order in f64. lse[..] is kept for the backward pass. x, weight: one floating
/// dtype; targets: any index type; loss and lse: f32 (f64 for f64), lse stored dense.
size_t linear_cross_entropy_workspace(const View& x, const View& weight);
void linear_cross_entropy(const View& x, const View& weight, const View& targets,
                          int64_t ignore_index, const View& loss, const View& lse,
                          Workspace workspace);

/// dx[.., C] and dweight[V, C] of `dloss[]` times the loss, stored; View{} for one that is not
/// wanted. Computes the logits again. dweight may be f32 where weight is narrower.
size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight);
void linear_cross_entropy_backward(const View& x, const View& weight, const View& targets,
                                   int64_t ignore_index, const View& lse, const View& dloss,
                                   const View& dx, const View& dweight, Workspace workspace);

/// Loss and gradients for dloss = 1 in one pass: three products instead of four. The bits of the
/// two calls above.
size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight);
void linear_cross_entropy_fused(const View& x, const View& weight, const View& targets,
                                int64_t ignore_index, const View& loss, const View& dx,
                                const View& dweight, Workspace workspace);

}  // namespace sheaf::kernels::cpu
