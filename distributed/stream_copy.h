// Copies of what will not be read again soon.
#pragma once

#include <cstddef>

namespace sheaf {

/// Copies `bytes` bytes between ranges that do not overlap. Large ones bypass the caches: writing to memory without
/// reading it first saves a third of the traffic, and what the caches hold stays there.
void stream_copy(void* to, const void* from, size_t bytes);

}  // namespace sheaf
