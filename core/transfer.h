// Copies between devices.
#pragma once

#include <cstddef>

#include "sheaf/core/device.h"

namespace sheaf {

/// Copies between memory of the CPU and of the rank's GPU, in the order of its stream. The host may reuse its memory when the call
/// returns; copies from a GPU wait until the bytes have arrived.
void transfer(Device to_device, void* to, Device from_device, const void* from, size_t bytes);

}  // namespace sheaf
