// The peer of our device allocator: CUDA's own pool, whose blocks are in the order of a stream
// (cudaMallocAsync). On the emulated GPU, which has none, malloc stands in.
#pragma once

#include <cstddef>
#include <string>

#include "sheaf/core/device.h"

namespace sheaf::bench {

class StreamPool {
 public:
  /// A pool on `device` that keeps what was freed, as ours does.
  explicit StreamPool(int device);
  ~StreamPool();
  StreamPool(const StreamPool&) = delete;
  StreamPool& operator=(const StreamPool&) = delete;

  static std::string name();
  void* allocate(size_t bytes, const Stream& stream);
  void free(void* block, const Stream& stream);

 private:
  void* pool_ = nullptr;
};

}  // namespace sheaf::bench
