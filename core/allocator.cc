#include "sheaf/core/allocator.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "sheaf/core/arena.h"
#include "sheaf/core/error.h"
#include "sheaf/core/spin_mutex.h"

namespace sheaf {
namespace {

class Counter {
 public:
  void add(int64_t bytes) {
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
    ++stats_.allocations;
  }
  void remove(int64_t bytes) { stats_.live -= bytes; }
  MemoryStats stats_;
};

class MetaAllocator : public Allocator {
 public:
  void* allocate(size_t bytes, MemoryKind) override {
    std::lock_guard lock(mutex_);
    counter_.add(bytes);
    return nullptr;
  }
  void free(void*, size_t bytes) override { std::lock_guard lock(mutex_); counter_.remove(bytes); }
  MemoryStats stats() const override { std::lock_guard lock(mutex_); return counter_.stats_; }
  void reset_peak() override { std::lock_guard lock(mutex_); counter_.stats_.peak = counter_.stats_.live; }
  void add_wire(SharedRange) override {}

 private:
  mutable SpinMutex mutex_;
  Counter counter_;
};

#if defined(SHEAF_ASAN) || defined(SHEAF_TSAN)
// The sanitizers track malloc's blocks; inside one big range they would see nothing.
class NormalMemory {
 public:
  void* allocate(size_t size) { return std::aligned_alloc(Arena::kAlign, size); }
  void free(void* block, size_t) { std::free(block); }
  void give_back() {}
  size_t resident() const { return 0; }
};
#else
using NormalMemory = Arena;
#endif

class CpuAllocator : public Allocator {
 public:
  void* allocate(size_t bytes, MemoryKind where) override {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    const bool wire = where == MemoryKind::wire || where == MemoryKind::host_wire;
    void* block = wire && !wires_.empty() ? wires_.back()->allocate(size) : nullptr;
    if (!block) block = normal_.allocate(size);
    if (!block)
      fail<OutOfMemory>("[allocator] cannot allocate ", bytes, " bytes in addition to the ", counter_.stats_.live,
                        " that are in use: the address space is too small (ulimit -v), or the size is a mistake");
    counter_.add(bytes);
    return block;
  }

  void free(void* block, size_t bytes) override {
    std::lock_guard lock(mutex_);
    counter_.remove(bytes);
    for (auto& wire : wires_)
      if (wire->holds(block)) return wire->free(block, rounded(bytes));
    normal_.free(block, rounded(bytes));
  }

  MemoryStats stats() const override {
    std::lock_guard lock(mutex_);
    MemoryStats s = counter_.stats_;
    s.reserved = static_cast<int64_t>(resident());
    return s;
  }
  void reset_peak() override { std::lock_guard lock(mutex_); counter_.stats_.peak = counter_.stats_.live; }

  void give_back() override {
    std::lock_guard lock(mutex_);
    normal_.give_back();
    for (auto& wire : wires_) wire->give_back();
  }

  void add_wire(SharedRange range) override {
    std::lock_guard lock(mutex_);
    wires_.push_back(std::make_unique<Arena>(std::move(range)));
  }

 private:
  static size_t rounded(size_t bytes) {
    return std::max(Arena::kAlign, (bytes + Arena::kAlign - 1) / Arena::kAlign * Arena::kAlign);
  }
  size_t resident() const {
    size_t bytes = normal_.resident();
    for (const auto& wire : wires_) bytes += wire->resident();
    return bytes;
  }

  mutable SpinMutex mutex_;
  NormalMemory normal_;
  std::vector<std::unique_ptr<Arena>> wires_;  // of earlier worlds too: their blocks may still be alive
  Counter counter_;
};

}  // namespace

std::shared_ptr<Allocator> make_cpu_allocator() { return std::make_shared<CpuAllocator>(); }
std::shared_ptr<Allocator> make_meta_allocator() { return std::make_shared<MetaAllocator>(); }

}  // namespace sheaf
