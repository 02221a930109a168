#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

using Blocks = std::multimap<size_t, void*>;  // by size

void* take(Blocks& from, size_t size) {
  const auto it = from.find(size);
  return it == from.end() ? nullptr : from.extract(it).mapped();
}

/// [Note: memory of graphs], device_allocator.cc.
struct GraphMemory {
  std::set<void*> taken;
  Blocks free;   // blocks of these
  Blocks older;  // from before the capture, freed in it
};

// Locking pages is slow, so locked memory is kept. Blocks are the driver's and are not split: a model requests the same few sizes
// again.
class PinnedAllocator : public GraphAllocator,
                        public std::enable_shared_from_this<PinnedAllocator> {
 public:
  explicit PinnedAllocator(int device) : device_(device) {}
  ~PinnedAllocator() override {
    try {
      use_device(device_);
      for (const auto& [size, block] : free_) free_pinned(block);
    } catch (const CudaError&) {
    }  // reported by the call that failed
  }
  PinnedAllocator(const PinnedAllocator&) = delete;
  PinnedAllocator& operator=(const PinnedAllocator&) = delete;

  void* allocate(size_t bytes, MemoryKind) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    void* block = open_ ? take(open_->free, size) : nullptr;
    if (!block) block = take(free_, size);
    if (!block) {
      use_device(device_);
      try {
        block = allocate_pinned(size);
      } catch (const OutOfMemory& e) {
        fail<OutOfMemory>(e.what(), "; ", stats_.live, " bytes are in use");
      }
      stats_.reserved += static_cast<int64_t>(size);
    }
    if (open_) open_->taken.insert(block);
    stats_.live += static_cast<int64_t>(bytes);
    stats_.peak = std::max(stats_.peak, stats_.live);
    ++stats_.allocations;
    return block;
  }
  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    stats_.live -= static_cast<int64_t>(bytes);
    Blocks* to = open_ ? &open_->older : &free_;
    for (const auto& graph : graphs_)
      if (graph->taken.contains(block)) to = &graph->free;
    to->emplace(rounded(bytes), block);
  }
  void begin_capture() override {
    std::lock_guard lock(mutex_);
    open_ = graphs_.emplace_back(std::make_shared<GraphMemory>());
  }
  std::shared_ptr<void> end_capture() override {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<GraphMemory> graph = std::exchange(open_, nullptr);
    return {graph.get(), [self = shared_from_this(), graph](void*) { self->give_back(graph); }};
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
  // Blocks still in use are returned when they are freed, like any block.
  void give_back(const std::shared_ptr<GraphMemory>& graph) {
    std::lock_guard lock(mutex_);
    std::erase(graphs_, graph);
    free_.merge(graph->free);
    free_.merge(graph->older);
  }
  static size_t rounded(size_t bytes) {
    constexpr size_t kAlign = 256;
    return std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  }

  const int device_;
  mutable std::mutex mutex_;
  Blocks free_;
  std::vector<std::shared_ptr<GraphMemory>> graphs_;
  std::shared_ptr<GraphMemory> open_;  // of the current capture
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<GraphAllocator> make_pinned_allocator(int device) {
  return std::make_shared<PinnedAllocator>(device);
}

}  // namespace sheaf::kernels::cuda
