// Makes a stream idle for a while, to simulate a link between ranks that is slower than memory.
#pragma once

#include <chrono>

#include "sheaf/core/device.h"

namespace sheaf::kernels::cuda {

/// Work enqueued on `stream` from now on starts `duration` later, by the device's clock (to about a microsecond). One warp waits; the
/// rest of the device is free meanwhile.
void idle(const Stream& stream, std::chrono::nanoseconds duration);

}  // namespace sheaf::kernels::cuda
