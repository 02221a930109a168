// Where values lie in one block of memory, when it is known beforehand from when to when each of them lives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sheaf {

/// Bytes that are needed from moment `first` to moment `last`, both included.
struct Lifetime {
  int32_t first, last;
  int64_t bytes;
};

struct Arrangement {
  std::vector<int64_t> offsets;  ///< bytes, multiples of kAlign; lifetimes that meet do not overlap
  int64_t total = 0;             ///< bytes of the whole block
  static constexpr int64_t kAlign = 128;
};

/// An arrangement with a small total; the least there is would be an NP-hard problem (dynamic storage allocation). The
/// largest blocks are placed first, each into the tightest gap that is free all its life (Pisarchyk and Lee 2020,
/// https://arxiv.org/abs/2001.03288, "greedy by size"); if what comes out is worse, in the order in which they begin, as an
/// allocator would place them that cannot look ahead. The same for the same lifetimes, on every machine.
Arrangement arrange(std::span<const Lifetime> lifetimes);

/// Most bytes, in multiples of Arrangement::kAlign, that live at one moment: no arrangement has a smaller total.
int64_t most_alive(std::span<const Lifetime> lifetimes);

}  // namespace sheaf
