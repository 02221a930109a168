// Cross-entropy of logits against target indices.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

/// losses[..] = lse - logits[.., target], lse[..] = log(sum(exp(logits[.., :]))); both f32 (f64 for
/// f64); stored dense. Where target == ignore_index both are 0. Another target outside [0, V) is a
/// DataError. logits' last dimension is dense.
void cross_entropy(const View& logits, const View& targets, int64_t ignore_index,
                   const View& losses, const View& lse);

/// dlogits = (exp(logits - lse) - onehot(target)) * scale; rows to ignore are 0. `scale` is one
/// value, or one per row in lse's dtype. dlogits may be the memory of logits.
void cross_entropy_backward(const View& logits, const View& targets, int64_t ignore_index,
                            const View& lse, const View& scale, const View& dlogits);

}  // namespace sheaf::kernels::cpu
