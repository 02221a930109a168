// Bytes from one device to another.
#pragma once

#include <cstddef>

#include "sheaf/core/device.h"

namespace sheaf {

/// Copies between memory of the CPU and of the rank's GPU, in the order of its stream. The host may use its memory when
/// the call returns; copies from a GPU wait until the bytes are there.
void transfer(Device to_device, void* to, Device from_device, const void* from, size_t bytes);

}  // namespace sheaf
