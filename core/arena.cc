#include "sheaf/core/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;
// Reserved address space, not memory: enough for every machine, or what a limit (ulimit -v) allows.
constexpr size_t kMostRange = size_t{1} << 40, kLeastRange = size_t{64} << 20;

struct Range {
  char* base;
  size_t bytes;
};

Range reserve() {
  const auto map = [](size_t bytes) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  for (size_t bytes = kMostRange; bytes >= kLeastRange; bytes /= 2) {
    // A quarter of it must be left over, for stacks, other ranks of the process and the libraries.
    const size_t with_rest = bytes + bytes / 4;
    void* p = map(with_rest);
    if (p == MAP_FAILED) continue;
    munmap(static_cast<char*>(p) + bytes, with_rest - bytes);
    madvise(p, bytes, MADV_HUGEPAGE);  // fewer faults and fewer misses of address translation
    return {static_cast<char*>(p), bytes};
  }
  const std::string why = std::generic_category().message(errno);
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  fail<OutOfMemory>("[allocator] cannot reserve ", kLeastRange, " bytes of address space: ", why,
                    limited ? str("; its limit is ", limit.rlim_cur, " bytes (ulimit -v)") : "");
}

}  // namespace

Arena::~Arena() {
  if (base_ && !shared_.base) munmap(base_, range_);
}

void* Arena::allocate(size_t size) {
  if (!base_) {
    const Range range = reserve();
    base_ = range.base, range_ = range.bytes;
  }
  auto fit = by_size_.lower_bound({size, 0});
  size_t offset;
  if (fit != by_size_.end()) {
    offset = fit->second;
    take(offset, size);
  } else {
    // A free block that ends at the top grows instead of leaving a hole.
    const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
    const bool grows = last != free_.end() && last->first + last->second.size == top_;
    offset = grows ? last->first : top_;
    if (size > range_ - offset) return nullptr;
    if (grows) resident_free_ -= remove(last).resident;
    top_ = offset + size;
  }
  used_ += size;
  most_used_ = std::max(most_used_, used_);
  const bool too_tight = retaken_ > most_used_ / 4;  // what one step returns the next one takes
  trim(most_used_ / (too_tight ? 8 : 16) + (size_t{8} << 20));
  return base_ + offset;
}

void Arena::free(void* block, size_t size) {
  used_ -= size;
  size_t offset = static_cast<char*>(block) - base_;
  Free merged{size, size, size};
  auto next = free_.lower_bound(offset);
  auto previous = next == free_.begin() ? free_.end() : std::prev(next);
  if (next != free_.end() && offset + size == next->first) merged = joined(merged, remove(next));
  if (previous != free_.end() && previous->first + previous->second.size == offset) {
    offset = previous->first;
    merged = joined(remove(previous), merged);
  }
  insert(offset, merged);
  resident_free_ += size;
}

void Arena::insert(size_t offset, Free f) {
  free_.emplace(offset, f);
  by_size_.insert({f.size, offset});
}

Arena::Free Arena::remove(Map::iterator it) {
  const Free f = it->second;
  by_size_.erase({f.size, it->first});
  free_.erase(it);
  return f;
}

Arena::Free Arena::joined(const Free& a, const Free& b) {
  return {a.size + b.size, a.resident + b.resident, b.extent > 0 ? a.size + b.extent : a.extent};
}

void Arena::take(size_t offset, size_t size) {
  const Free f = remove(free_.find(offset));
  const size_t extent = f.extent > size ? f.extent - size : 0;
  const Free rest{f.size - size, std::min(f.resident, extent), extent};
  const size_t resident = f.resident - rest.resident;
  resident_free_ -= resident;
  retaken_ += size - std::min(size, resident);
  if (rest.size > 0) insert(offset + size, rest);
}

void Arena::trim(size_t spare) {
  const size_t bound = most_used_ + spare;
  while (resident() > bound) {
    const auto largest = std::max_element(free_.begin(), free_.end(), [](const auto& a, const auto& b) {
      return a.second.resident < b.second.resident;
    });
    if (largest == free_.end() || largest->second.resident < 4 * kPage) return;
    auto& [offset, block] = *largest;
    // No more than necessary, or the next step faults it in again; from the block's end, as blocks are taken from the
    // front; whole huge pages if there are any.
    const size_t excess = resident() - bound, stays = offset + block.resident - std::min(block.resident, excess);
    const size_t end = offset + block.size, huge = stays / kHugePage * kHugePage;
    const size_t from = huge > offset ? huge : (offset + kPage - 1) / kPage * kPage, to = end / kPage * kPage;
    const size_t kept = std::min(block.resident, from - offset);
    // For shared memory the pages themselves must be freed, not only this process's view of them.
    if (to > from) madvise(base_ + from, to - from, shared_.base ? MADV_REMOVE : MADV_DONTNEED);
    resident_free_ -= block.resident - kept;
    block.resident = block.extent = kept;
  }
}

}  // namespace sheaf
