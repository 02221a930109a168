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
  static constexpr int64_t kAlign = 256;  ///< as of a GPU's allocator: NVIDIA's libraries want workspaces there
};

/// An arrangement with a small total; the least there is would be an NP-hard problem (dynamic storage allocation). Each
/// lifetime takes the tightest gap that is free all along: the largest first (Pisarchyk and Lee 2020,
/// https://arxiv.org/abs/2001.03288, "greedy by size"), or those with the most bytes times moments, or in the order in which
/// they begin, as an allocator has to that cannot look ahead; whichever gives the least. The same for the same lifetimes, on
/// every machine.
Arrangement arrange(std::span<const Lifetime> lifetimes);

/// Most bytes, in multiples of Arrangement::kAlign, that live at one moment: no arrangement has a smaller total.
int64_t most_alive(std::span<const Lifetime> lifetimes);

}  // namespace sheaf
