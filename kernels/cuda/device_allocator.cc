#include <algorithm>
#include <mutex>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/free_blocks.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kLeastGrowth = size_t{32} << 20;  // mapping takes the driver tens of microseconds

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/// [Note: memory of graphs] A graph runs with the addresses that its capture was given. What a
/// capture takes from the range is the graph's, until the graph goes: blocks freed meanwhile are
/// handed out again within the same capture, and to nobody else, so that whatever comes to live
/// beside the graph lies elsewhere. It counts as alive with the most that was alive in the capture:
/// a replay's peak is that of the same work done without a graph.
struct GraphMemory {
  std::map<size_t, size_t> taken;                // offset, size: from the range
  FreeBlocks free;                               // of these
  std::vector<std::pair<size_t, size_t>> older;  // blocks from before the capture, freed in it: the
                                                 // graph may read them
  int64_t older_bytes = 0;                       // as they were asked for
  int64_t live = 0, peak = 0;                    // requested bytes of blocks within

  bool holds(size_t offset) const {
    const auto after = taken.upper_bound(offset);
    return after != taken.begin() &&
           offset < std::prev(after)->first + std::prev(after)->second;
  }
};

class GrowingAllocator : public DeviceAllocator,
                         public std::enable_shared_from_this<GrowingAllocator> {
 public:
  explicit GrowingAllocator(int device) : device_(device) {}
  ~GrowingAllocator() override {
    try {
      release(range_);
    } catch (const CudaError&) {
    }  // reported where it happened
  }

  void* allocate(size_t bytes, HostMemory) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    const size_t offset = open_ ? take_for_graph(bytes, size) : take(bytes, size);
    if (open_) {
      open_->live += static_cast<int64_t>(bytes);
      open_->peak = std::max(open_->peak, open_->live);
    }
    count(static_cast<int64_t>(bytes));
    ++stats_.allocations;
    return range_.base + offset;
  }

  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    const auto offset = static_cast<size_t>(static_cast<char*>(block) - range_.base);
    const auto asked = static_cast<int64_t>(bytes);
    for (const auto& graph : graphs_)
      if (graph->holds(offset)) {
        graph->free.put(offset, rounded(bytes)), graph->live -= asked;
        if (graph == open_) count(-asked);
        return;
      }
    if (open_) {
      open_->older.emplace_back(offset, rounded(bytes)), open_->older_bytes += asked;
      return;
    }
    free_.put(offset, rounded(bytes));
    count(-asked);
  }

  void begin_capture() override {
    std::lock_guard lock(mutex_);
    open_ = std::make_shared<GraphMemory>();
    graphs_.push_back(open_);
  }
  std::shared_ptr<void> end_capture() override {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<GraphMemory> graph = std::move(open_);
    open_ = nullptr;
    count(graph->peak - graph->live);
    return {graph.get(), [self = shared_from_this(), graph](void*) { self->give_back(graph); }};
  }

  MemoryStats stats() const override {
    std::lock_guard lock(mutex_);
    MemoryStats s = stats_;
    s.reserved = static_cast<int64_t>(range_.mapped);
    return s;
  }
  void reset_peak() override {
    std::lock_guard lock(mutex_);
    stats_.peak = stats_.live;
  }
  bool holds(const void* address) const override {
    std::lock_guard lock(mutex_);
    // The end belongs to it: an empty view of its last block lies there.
    return address >= range_.base && address <= range_.base + range_.mapped && range_.base;
  }
  void add_wire(SharedRange) override {}  // of the host

 private:
  static size_t rounded(size_t bytes) { return std::max(kAlign, round_up(bytes, kAlign)); }

  void count(int64_t bytes) {
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
  }

  size_t take(size_t bytes, size_t size) {
    std::optional<size_t> offset = free_.take(size);
    if (!offset) {
      grow(bytes, size);
      offset = free_.take(size);
    }
    return *offset;
  }
  size_t take_for_graph(size_t bytes, size_t size) {
    if (const std::optional<size_t> offset = open_->free.take(size)) return *offset;
    const size_t offset = take(bytes, size);
    open_->taken[offset] = size;
    return offset;
  }

  // What still lives in a graph's memory goes back when it dies, as any block.
  void give_back(const std::shared_ptr<GraphMemory>& graph) {
    std::lock_guard lock(mutex_);
    std::erase(graphs_, graph);
    for (const auto& [offset, size] : graph->free.pieces()) free_.put(offset, size);
    for (const auto& [offset, size] : graph->older) free_.put(offset, size);
    count(graph->live - graph->peak - graph->older_bytes);
  }

  // Makes a free block of `size` at the end of the range, which may begin with a free one that is
  // there.
  void grow(size_t bytes, size_t size) {
    if (!range_.base) {
      use_device(device_);
      granularity_ = map_granularity(device_);
      range_ = reserve(device_, round_up(memory_info().total, granularity_));
    }
    const size_t missing = round_up(size - free_.before(range_.mapped), granularity_);
    const size_t generous = std::max(missing, round_up(kLeastGrowth, granularity_));
    const size_t end = range_.mapped;
    if (!map(device_, range_, generous) && !map(device_, range_, missing)) {
      const DeviceMemoryInfo info = memory_info();
      fail<OutOfMemory>("[allocator] ", Device::cuda(device_).to_string(), " cannot give ", bytes,
                        " bytes: ", range_.mapped - free_.bytes(), " in use and ", free_.bytes(),
                        " free in pieces here, ", info.free, " of ", info.total,
                        " free on the device");
    }
    free_.put(end, range_.mapped - end);
  }

  const int device_;
  mutable std::mutex mutex_;
  DeviceRange range_;
  size_t granularity_ = 0;
  FreeBlocks free_;
  std::vector<std::shared_ptr<GraphMemory>> graphs_;
  std::shared_ptr<GraphMemory> open_;  // of the capture that goes on
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<DeviceAllocator> make_device_allocator(int device) {
  return std::make_shared<GrowingAllocator>(device);
}

}  // namespace sheaf::kernels::cuda
