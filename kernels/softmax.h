// Softmax and log-softmax over the last dimension, which must be dense; leading dimensions have any
// strides. A row's value depends only on that row. The row maximum is taken first, then exp, so that nothing
// overflows.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

void softmax(const View& x, const View& y);
/// dx = y * (dy - sum(dy * y)).
void softmax_backward(const View& y, const View& dy, const View& dx);

void log_softmax(const View& x, const View& y);
/// dx = dy - exp(y) * sum(dy).
void log_softmax_backward(const View& y, const View& dy, const View& dx);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`; an output may be the same memory as an input. The order
/// of a row's sum is a function of its width and element type.
namespace cuda {

void softmax(const Stream& stream, const View& x, const View& y);
void softmax_backward(const Stream& stream, const View& y, const View& dy, const View& dx);
void log_softmax(const Stream& stream, const View& x, const View& y);
void log_softmax_backward(const Stream& stream, const View& y, const View& dy, const View& dx);

}  // namespace cuda
}  // namespace sheaf::kernels
