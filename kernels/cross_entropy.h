// Cross-entropy of logits against target indices.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// losses[..] = lse - logits[.., target], lse[..] = log(sum(exp(logits[.., :]))); both f32 (f64 for
/// f64); stored dense. Where target == ignore_index both are 0. Another target outside [0, V) is a
/// DataError. logits' last dimension is dense.
void cross_entropy(const View& logits, const View& targets, int64_t ignore_index,
                   const View& losses, const View& lse);

/// dlogits = (exp(logits - lse) - onehot(target)) * scale; rows to ignore are 0. `scale` is one
/// value, or one per row in lse's dtype. dlogits may share the memory of logits.
void cross_entropy_backward(const View& logits, const View& targets, int64_t ignore_index,
                            const View& lse, const View& scale, const View& dlogits);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. A target outside [0, V) other than ignore_index cannot
/// throw there: its row's loss, and in the backward the row's gradients, are NaN.
namespace cuda {

void cross_entropy(const Stream& stream, const View& logits, const View& targets,
                   int64_t ignore_index, const View& losses, const View& lse);
void cross_entropy_backward(const Stream& stream, const View& logits, const View& targets,
                            int64_t ignore_index, const View& lse, const View& scale,
                            const View& dlogits);

}  // namespace cuda
}  // namespace sheaf::kernels
