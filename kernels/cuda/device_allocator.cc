#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kLeastGrowth = size_t{32} << 20;  // mapping takes the driver tens of microseconds

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

class GrowingAllocator : public DeviceAllocator {
 public:
  explicit GrowingAllocator(int device) : device_(device) {}
  ~GrowingAllocator() override { release(range_); }

  void* allocate(size_t bytes, HostMemory) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    auto fit = by_size_.lower_bound({size, 0});
    if (fit == by_size_.end()) {
      grow(bytes, size);
      fit = by_size_.lower_bound({size, 0});
    }
    const auto [free_size, offset] = *fit;
    take_out(offset);
    if (free_size > size) put_in(offset + size, free_size - size);
    used_ += size;
    stats_.live += static_cast<int64_t>(bytes);
    stats_.peak = std::max(stats_.peak, stats_.live);
    ++stats_.allocations;
    return range_.base + offset;
  }

  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    stats_.live -= static_cast<int64_t>(bytes);
    size_t offset = static_cast<size_t>(static_cast<char*>(block) - range_.base),
           size = rounded(bytes);
    used_ -= size;
    const auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + size) {
      size += next->second;
      take_out(next->first);
    }
    const auto after = free_.lower_bound(offset);
    if (after != free_.begin())
      if (const auto before = std::prev(after); before->first + before->second == offset) {
        offset = before->first, size += before->second;
        take_out(before->first);
      }
    put_in(offset, size);
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

  void put_in(size_t offset, size_t size) {
    free_[offset] = size;
    by_size_.insert({size, offset});
  }
  void take_out(size_t offset) {
    const auto it = free_.find(offset);
    by_size_.erase({it->second, offset});
    free_.erase(it);
  }

  // Makes a free block of `size` at the end of the range, which may begin with a free one that is
  // there.
  void grow(size_t bytes, size_t size) {
    if (!range_.base) {
      use_device(device_);
      granularity_ = map_granularity(device_);
      range_ = reserve(device_, round_up(memory_info().total, granularity_));
    }
    size_t tail = 0;
    if (!free_.empty())
      if (const auto last = std::prev(free_.end()); last->first + last->second == range_.mapped)
        tail = last->second;
    const size_t missing = round_up(size - tail, granularity_);
    const size_t begin = range_.mapped - tail;
    const size_t generous = std::max(missing, round_up(kLeastGrowth, granularity_));
    if (!map(device_, range_, generous) && !map(device_, range_, missing)) {
      const DeviceMemoryInfo info = memory_info();
      fail<OutOfMemory>("[allocator] ", Device::cuda(device_).to_string(), " cannot give ", bytes,
                        " bytes: ", used_, " in use and ", range_.mapped - used_,
                        " free in pieces here, ", info.free, " of ", info.total,
                        " free on the device");
    }
    if (tail) take_out(begin);
    put_in(begin, range_.mapped - begin);
  }

  const int device_;
  mutable std::mutex mutex_;
  DeviceRange range_;
  size_t granularity_ = 0, used_ = 0;
  std::map<size_t, size_t> free_;                // offset, size
  std::set<std::pair<size_t, size_t>> by_size_;  // size, offset
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<DeviceAllocator> make_device_allocator(int device) {
  return std::make_shared<GrowingAllocator>(device);
}

}  // namespace sheaf::kernels::cuda
