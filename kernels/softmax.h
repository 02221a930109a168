// Softmax and log-softmax over the last dimension, which must be dense; leading dimensions have any
// strides. A row's value depends on that row alone. Reference: row maximum first, then exp, so that
// nothing overflows.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

void softmax(const View& x, const View& y);
/// dx = y * (dy - sum(dy * y)).
void softmax_backward(const View& y, const View& dy, const View& dx);

void log_softmax(const View& x, const View& y);
/// dx = dy - exp(y) * sum(dy).
void log_softmax_backward(const View& y, const View& dy, const View& dx);

}  // namespace sheaf::kernels::cpu
