#include <cstdlib>

#include "sheaf/tools/bench/stream_pool.h"

namespace sheaf::bench {

StreamPool::StreamPool(int) {}
StreamPool::~StreamPool() = default;
std::string StreamPool::name() { return "malloc"; }
void* StreamPool::allocate(size_t bytes, const Stream&) { return std::malloc(bytes); }
void StreamPool::free(void* block, const Stream&) { std::free(block); }

}  // namespace sheaf::bench
