#include <map>
#include <mutex>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

// Locking pages is slow: what was locked is kept. Blocks are the driver's own and are not split: a
// model asks for the same few sizes again.
class PinnedAllocator : public Allocator {
 public:
  explicit PinnedAllocator(int device) : device_(device) {}
  ~PinnedAllocator() override {
    try {
      use_device(device_);
      for (const auto& [size, block] : free_) free_pinned(block);
    } catch (const CudaError&) {
    }  // reported where it happened
  }
  PinnedAllocator(const PinnedAllocator&) = delete;
  PinnedAllocator& operator=(const PinnedAllocator&) = delete;

  void* allocate(size_t bytes, MemoryKind) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    void* block = nullptr;
    if (const auto it = free_.find(size); it != free_.end()) {
      block = it->second;
      free_.erase(it);
    } else {
      use_device(device_);
      try {
        block = allocate_pinned(size);
      } catch (const OutOfMemory& e) {
        fail<OutOfMemory>(e.what(), "; ", stats_.live, " bytes are in use");
      }
      stats_.reserved += static_cast<int64_t>(size);
    }
    stats_.live += static_cast<int64_t>(bytes);
    stats_.peak = std::max(stats_.peak, stats_.live);
    ++stats_.allocations;
    return block;
  }
  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    free_.emplace(rounded(bytes), block);
    stats_.live -= static_cast<int64_t>(bytes);
  }
  MemoryStats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() override {
    std::lock_guard lock(mutex_);
    stats_.peak = stats_.live;
  }
  void add_wire(SharedRange) override {}

 private:
  static size_t rounded(size_t bytes) {
    constexpr size_t kAlign = 256;
    return std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  }

  const int device_;
  mutable std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<Allocator> make_pinned_allocator(int device) {
  return std::make_shared<PinnedAllocator>(device);
}

}  // namespace sheaf::kernels::cuda
