// Copies of what will not be read again soon.
#pragma once

#include <cstddef>

namespace sheaf {

/// Copies `bytes` bytes between ranges that do not overlap, past the caches: writing to memory without reading it first
/// saves a third of the traffic, and what the caches hold stays there. For much at once; memcpy is better for what will
/// be used before a cache has forgotten it.
void stream_copy(void* to, const void* from, size_t bytes);

}  // namespace sheaf
