// The peer of our device allocator: CUDA's stream-ordered pool (cudaMallocAsync). The emulated GPU has none and uses malloc.
#pragma once

#include <cstddef>
#include <string>

#include "sheaf/core/device.h"

namespace sheaf::bench {

class StreamPool {
 public:
  /// A pool on `device` that caches freed memory, as ours does.
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
