// Arena: best fit over one range of addresses, with a bound on what free blocks keep resident.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "sheaf/core/allocator.h"

namespace sheaf {

/// Hands out blocks whose sizes are multiples of kAlign; blocks are split and merged. Takes pages when blocks are first touched, and
/// returns those of free blocks when it holds a sixteenth (and 8 MiB) more than was ever in use at once; an eighth, if it had to take
/// many of them again. A bound over several arenas together would be tighter, but they peak at different times of a step: each would
/// return, and fault in again in every step, what another one has free. Not thread-safe.
class Arena {
 public:
  static constexpr size_t kAlign = 128;

  /// Private memory: reserves address space when the first block is taken.
  Arena() = default;
  /// Memory that other processes map, too.
  explicit Arena(SharedRange range) : shared_(std::move(range)), base_(shared_.base), range_(shared_.bytes) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Null if the range has no room.
  void* allocate(size_t size);
  void free(void* block, size_t size);
  /// Returns the pages of all free blocks, except some at their borders.
  void give_back() { most_used_ = used_, retaken_ = 0, trim(0); }
  bool holds(const void* block) const { return block >= base_ && block < base_ + range_; }

  size_t resident() const { return used_ + resident_free_; }  ///< upper bound of the bytes that hold pages

 private:
  struct Free {
    size_t size;
    size_t resident;  // at most this many of its bytes hold pages,
    size_t extent;    // which are in the first `extent` ones
  };
  using Map = std::map<size_t, Free>;

  void insert(size_t offset, Free f);
  Free remove(Map::iterator it);
  static Free joined(const Free& a, const Free& b);
  void take(size_t offset, size_t size);
  void trim(size_t spare);

  SharedRange shared_;
  char* base_ = nullptr;
  size_t range_ = 0;
  size_t top_ = 0, used_ = 0, most_used_ = 0, resident_free_ = 0;
  size_t retaken_ = 0;  // bytes of blocks whose pages had been returned
  Map free_;                                     // by offset
  std::set<std::pair<size_t, size_t>> by_size_;  // (size, offset)
};

}  // namespace sheaf
