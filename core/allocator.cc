#include "sheaf/core/allocator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

constexpr size_t kAlign = 128;
constexpr size_t kPage = 4096;
constexpr size_t kVirtualRange = size_t{1} << 40;  // reserved address space, not memory
constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

class Counter {
 public:
  void add(int64_t bytes) {
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
    ever_peak_ = std::max(ever_peak_, stats_.live);
    ++stats_.allocations;
  }
  void remove(int64_t bytes) { stats_.live -= bytes; }
  MemoryStats stats_;
  int64_t ever_peak_ = 0;
};

class MetaAllocator : public Allocator {
 public:
  void* allocate(size_t bytes) override { std::lock_guard lock(mutex_); counter_.add(bytes); return nullptr; }
  void free(void*, size_t bytes) override { std::lock_guard lock(mutex_); counter_.remove(bytes); }
  MemoryStats stats() const override { std::lock_guard lock(mutex_); return counter_.stats_; }
  void reset_peak() override { std::lock_guard lock(mutex_); counter_.stats_.peak = counter_.stats_.live; }

 private:
  mutable std::mutex mutex_;
  Counter counter_;
};

#if defined(SHEAF_ASAN) || defined(SHEAF_TSAN)
// The sanitizers watch malloc's blocks; inside one big range they would see nothing.
class CpuAllocator : public Allocator {
 public:
  void* allocate(size_t bytes) override {
    void* p = std::aligned_alloc(kAlign, std::max(kAlign, round_up(bytes, kAlign)));
    if (!p) fail<OutOfMemory>("[allocator] cannot allocate ", bytes, " bytes");
    std::lock_guard lock(mutex_);
    counter_.add(bytes);
    return p;
  }
  void free(void* block, size_t bytes) override {
    std::free(block);
    std::lock_guard lock(mutex_);
    counter_.remove(bytes);
  }
  MemoryStats stats() const override { std::lock_guard lock(mutex_); return counter_.stats_; }
  void reset_peak() override { std::lock_guard lock(mutex_); counter_.stats_.peak = counter_.stats_.live; }

 private:
  mutable std::mutex mutex_;
  Counter counter_;
};
#else
class CpuAllocator : public Allocator {
 public:
  ~CpuAllocator() override {
    if (base_) munmap(base_, kVirtualRange);
  }

  void* allocate(size_t bytes) override {
    const size_t size = std::max(kAlign, round_up(bytes, kAlign));
    std::lock_guard lock(mutex_);
    if (!base_) reserve();
    auto fit = by_size_.lower_bound({size, 0});
    size_t offset;
    if (fit != by_size_.end()) {
      offset = fit->second;
      take(offset, size);
    } else {
      offset = top_;
      // A free block that ends at the top grows instead of leaving a hole behind.
      if (!free_.empty()) {
        auto last = std::prev(free_.end());
        if (last->first + last->second.size == top_) {
          offset = last->first;
          resident_free_ -= last->second.resident;
          by_size_.erase({last->second.size, last->first});
          free_.erase(last);
        }
      }
      if (offset + size > kVirtualRange) fail<OutOfMemory>("[allocator] cannot allocate ", bytes, " bytes");
      top_ = offset + size;
    }
    used_ += size;
    counter_.add(bytes);
    trim();
    return base_ + offset;
  }

  void free(void* block, size_t bytes) override {
    const size_t size = std::max(kAlign, round_up(bytes, kAlign));
    std::lock_guard lock(mutex_);
    counter_.remove(bytes);
    used_ -= size;
    size_t offset = static_cast<char*>(block) - base_;
    Free merged{size, size};
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + size == next->first) next = absorb(next, merged);
    if (next != free_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second.size == offset) {
        offset = previous->first;
        absorb(previous, merged);
      }
    }
    insert(offset, merged);
    resident_free_ += size;
  }

  MemoryStats stats() const override {
    std::lock_guard lock(mutex_);
    MemoryStats s = counter_.stats_;
    s.reserved = static_cast<int64_t>(used_ + resident_free_);
    return s;
  }
  void reset_peak() override { std::lock_guard lock(mutex_); counter_.stats_.peak = counter_.stats_.live; }

 private:
  struct Free {
    size_t size, resident;  // resident: upper bound of the bytes in it that hold pages
  };
  using Map = std::map<size_t, Free>;

  void reserve() {
    void* p = mmap(nullptr, kVirtualRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail<OutOfMemory>("[allocator] cannot reserve address space");
    base_ = static_cast<char*>(p);
  }
  void insert(size_t offset, Free f) {
    free_.emplace(offset, f);
    by_size_.insert({f.size, offset});
  }
  Map::iterator absorb(Map::iterator it, Free& into) {
    into.size += it->second.size;
    into.resident += it->second.resident;
    by_size_.erase({it->second.size, it->first});
    return free_.erase(it);
  }
  void take(size_t offset, size_t size) {
    auto it = free_.find(offset);
    Free f = it->second;
    by_size_.erase({f.size, offset});
    free_.erase(it);
    const Free rest{f.size - size, std::min(f.resident, f.size - size)};
    resident_free_ -= f.resident - rest.resident;
    if (rest.size > 0) insert(offset + size, rest);
  }
  // Keeps the resident size within a sixteenth (and 8 MiB) of the most that was ever alive.
  void trim() {
    const size_t bound = counter_.ever_peak_ + counter_.ever_peak_ / 16 + (size_t{8} << 20);
    while (used_ + resident_free_ > bound && resident_free_ > 0) {
      auto largest = free_.end();
      for (auto it = free_.begin(); it != free_.end(); ++it)
        if (it->second.resident > (largest == free_.end() ? 0 : largest->second.resident)) largest = it;
      if (largest == free_.end() || largest->second.resident < 4 * kPage) return;
      const size_t from = round_up(largest->first, kPage), to = (largest->first + largest->second.size) / kPage * kPage;
      if (to > from) madvise(base_ + from, to - from, MADV_DONTNEED);
      resident_free_ -= largest->second.resident;
      largest->second.resident = 0;
    }
  }

  mutable std::mutex mutex_;
  char* base_ = nullptr;
  size_t top_ = 0, used_ = 0, resident_free_ = 0;
  Map free_;                                     // by offset
  std::set<std::pair<size_t, size_t>> by_size_;  // (size, offset)
  Counter counter_;
};
#endif

}  // namespace

std::shared_ptr<Allocator> make_cpu_allocator() { return std::make_shared<CpuAllocator>(); }
std::shared_ptr<Allocator> make_meta_allocator() { return std::make_shared<MetaAllocator>(); }

}  // namespace sheaf
