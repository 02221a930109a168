// A stream that does nothing for a while, so that a link between ranks can look slower than memory
// is.
#pragma once

#include <chrono>

#include "sheaf/core/device.h"

namespace sheaf::kernels::cuda {

/// What is enqueued on `stream` from now on starts `duration` later, by the device's clock (about a
/// microsecond fine). One warp waits; the rest of the device is free meanwhile.
void idle(const Stream& stream, std::chrono::nanoseconds duration);

}  // namespace sheaf::kernels::cuda
