// Positions sorted by index: the input of a scatter in fixed order.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda {

/// Positions of an index view (flat, row-major), by index and then by position. Keys are indices
/// counted from `first`; positions whose key would be outside [0, size) come last, with the key
/// `size`.
struct Sorted {
  const uint32_t* keys;
  const uint32_t* positions;
};
size_t sort_workspace(int64_t count, int64_t size);
/// Needs count and size below 2^31.
Sorted sort_positions(const char* name, const Stream& stream, const View& index, int64_t first,
                      int64_t size, Workspace workspace);

}  // namespace sheaf::kernels::cuda
