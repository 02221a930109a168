#include <algorithm>
#include <mutex>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/core/warning.h"
#include "sheaf/kernels/cuda/free_blocks.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/piece_pool.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kLeastGrowth = size_t{32} << 20;  // mapping takes the driver tens of microseconds

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

constexpr size_t kWire = size_t{1} << 60;  // where the offsets of the wire pool begin

/// Free blocks of the range, or of the pieces in its place, and of the wire pool, by their offsets.
struct Free {
  FreeBlocks range, pool;
  FreeBlocks& of(size_t offset) { return offset >= kWire ? pool : range; }
  void put(size_t offset, size_t size) { of(offset).put(offset, size); }
  void put_all(const Free& other) {
    for (const auto& [offset, size] : other.range.pieces()) range.put(offset, size);
    for (const auto& [offset, size] : other.pool.pieces()) pool.put(offset, size);
  }
};

/// [Note: memory of graphs] A graph runs with the addresses of its capture. Memory allocated during a capture belongs to the graph
/// until the graph is destroyed: blocks freed meanwhile are handed out again only within the same capture, so later blocks never
/// overlap the graph's. It counts as alive with the largest size that was alive in the capture: a replay's peak is that of the same
/// work without a graph.
struct GraphMemory {
  std::map<size_t, size_t> taken;                // offset, size
  Free free;                                     // blocks of these
  std::vector<std::pair<size_t, size_t>> older;  // blocks from before the capture, freed in it: the
                                                 // graph may read them
  int64_t older_bytes = 0;                       // as requested
  int64_t live = 0, peak = 0;                    // requested bytes of blocks within

  bool holds(size_t offset) const {
    const auto after = taken.upper_bound(offset);
    return after != taken.begin() &&
           offset < std::prev(after)->first + std::prev(after)->second;
  }
};

/// Where the driver cannot map memory.
class SeparatePieces final : public PieceSource {
 public:
  void* allocate(int device, size_t bytes) override {
    use_device(device);
    try {
      return cuda::allocate(bytes);
    } catch (const OutOfMemory&) {
      return nullptr;
    }
  }
  void free(void* piece) override { cuda::free(piece); }
};

class GrowingAllocator : public DeviceAllocator,
                         public std::enable_shared_from_this<GrowingAllocator> {
 public:
  GrowingAllocator(int device, bool can_map) : device_(device), pieces_(device, 0), pool_(device, kWire) {
    if (!can_map) pieces_.set_source(std::make_shared<SeparatePieces>());
  }
  ~GrowingAllocator() override {
    try {
      use_device(device_);
      release(range_);
    } catch (const CudaError&) {
    }  // reported by the call that failed
  }

  void* allocate(size_t bytes, MemoryKind kind) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    const bool wire =
        (kind == MemoryKind::wire || kind == MemoryKind::landing) && pool_.there();
    const size_t offset = open_ ? take_for_graph(bytes, size, wire) : take(bytes, size, wire);
    if (open_) {
      open_->live += static_cast<int64_t>(bytes);
      open_->peak = std::max(open_->peak, open_->live);
    }
    count(static_cast<int64_t>(bytes));
    ++stats_.allocations;
    return address_of(offset);
  }

  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    const size_t offset = offset_of(block);
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
    s.reserved = static_cast<int64_t>(reserved());
    return s;
  }
  void reset_peak() override {
    std::lock_guard lock(mutex_);
    stats_.peak = stats_.live;
  }
  bool holds(const void* address) const override {
    std::lock_guard lock(mutex_);
    // The end counts as inside: an empty view of its last block may point there.
    return (address >= range_.base && address <= range_.base + range_.mapped && range_.base) ||
           pieces_.holds(address) || pool_.holds(address);
  }
  void set_wire(std::shared_ptr<PieceSource> source) override {
    std::lock_guard lock(mutex_);
    if (pool_.there()) return;
    pool_.set_source(std::move(source));
    try {
      grow_in(pool_, PiecePool::kPiece, PiecePool::kPiece);
    } catch (...) {
      pool_.set_source(nullptr);
      throw;
    }
  }
  std::vector<MemoryPiece> wire_pieces(size_t known) const override {
    std::lock_guard lock(mutex_);
    const std::vector<MemoryPiece>& all = pool_.pieces();
    return {all.begin() + static_cast<std::ptrdiff_t>(std::min(known, all.size())), all.end()};
  }
  void add_wire(SharedRange) override {}  // wire memory of the host

 private:
  static size_t rounded(size_t bytes) { return std::max(kAlign, round_up(bytes, kAlign)); }

  void count(int64_t bytes) {
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
  }

  size_t take(size_t bytes, size_t size, bool wire) {
    FreeBlocks& blocks = wire ? free_.pool : free_.range;
    std::optional<size_t> offset = blocks.take(size);
    if (!offset) {
      wire ? grow_in(pool_, bytes, size) : grow(bytes, size);
      offset = blocks.take(size);
    }
    return *offset;
  }
  size_t take_for_graph(size_t bytes, size_t size, bool wire) {
    FreeBlocks& blocks = wire ? open_->free.pool : open_->free.range;
    if (const std::optional<size_t> offset = blocks.take(size)) return *offset;
    const size_t offset = take(bytes, size, wire);
    open_->taken[offset] = size;
    return offset;
  }

  // Blocks still alive in a graph's memory are returned when they are freed, like any block.
  void give_back(const std::shared_ptr<GraphMemory>& graph) {
    std::lock_guard lock(mutex_);
    std::erase(graphs_, graph);
    free_.put_all(graph->free);
    for (const auto& [offset, size] : graph->older) free_.put(offset, size);
    count(graph->live - graph->peak - graph->older_bytes);
  }

  char* address_of(size_t offset) const {
    return offset >= kWire ? pool_.address(offset) : pieces_.there() ? pieces_.address(offset) : range_.base + offset;
  }
  size_t offset_of(const void* block) const {
    if (const auto offset = pool_.offset(block)) return *offset;
    if (const auto offset = pieces_.offset(block)) return *offset;
    return static_cast<size_t>(static_cast<const char*>(block) - range_.base);
  }
  size_t reserved() const { return range_.mapped + pieces_.bytes() + pool_.bytes(); }

  // Creates a free block of `size`: in pieces from the first on that the driver cannot map.
  void grow(size_t bytes, size_t size) {
    if (!pieces_.there()) {
      try {
        return grow_range(bytes, size);
      } catch (const CudaError& error) {
        if (range_.mapped > 0) throw;
        warn_on_stderr(str("[allocator] ", Device::cuda(device_).to_string(), " cannot map memory into one range (", error.what(),
                           "): it is allocated in pieces, between which some is lost"));
      }
      pieces_.set_source(std::make_shared<SeparatePieces>());
    }
    grow_in(pieces_, bytes, size);
  }
  // At the end of the range, extending a free one that is there.
  void grow_range(size_t bytes, size_t size) {
    if (!range_.base) {
      use_device(device_);
      granularity_ = map_granularity(device_);
      range_ = reserve(device_, round_up(memory_info().total, granularity_));
    }
    const size_t missing = round_up(size - free_.range.before(range_.mapped), granularity_);
    const size_t generous = std::max(missing, round_up(kLeastGrowth, granularity_));
    const size_t end = range_.mapped;
    if (!map(device_, range_, generous) && !map(device_, range_, missing)) fail_to_give(bytes);
    free_.range.put(end, range_.mapped - end);
  }
  void grow_in(PiecePool& pool, size_t bytes, size_t size) {
    const std::optional<size_t> offset = pool.grow(size);
    if (!offset) fail_to_give(bytes);
    free_.put(*offset, pool.pieces().back().bytes);
  }
  [[noreturn]] void fail_to_give(size_t bytes) {
    use_device(device_);
    const DeviceMemoryInfo info = memory_info();
    const size_t free = free_.range.bytes() + free_.pool.bytes();
    fail<OutOfMemory>("[allocator] ", Device::cuda(device_).to_string(), " cannot give ", bytes,
                      " bytes: ", reserved() - free, " in use and ", free,
                      " free in pieces here, ", info.free, " of ", info.total,
                      " free on the device");
  }

  const int device_;
  mutable std::mutex mutex_;
  DeviceRange range_;
  size_t granularity_ = 0;
  PiecePool pieces_;  // in place of the range, if it has a source
  PiecePool pool_;    // of wire and landing blocks
  Free free_;
  std::vector<std::shared_ptr<GraphMemory>> graphs_;
  std::shared_ptr<GraphMemory> open_;  // of the current capture
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<DeviceAllocator> make_device_allocator(int device, bool can_map) {
  return std::make_shared<GrowingAllocator>(device, can_map);
}

}  // namespace sheaf::kernels::cuda
