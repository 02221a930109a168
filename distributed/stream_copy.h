// Copies of data that will not be read again soon.
#pragma once

#include <cstddef>

namespace sheaf {

/// Copies `bytes` bytes between ranges that do not overlap, past the caches: writing to memory without reading it first
/// saves a third of the traffic, and the caches keep their contents. For large copies; memcpy is better for data that
/// will be used while still cached.
void stream_copy(void* to, const void* from, size_t bytes);

}  // namespace sheaf
