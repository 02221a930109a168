// Where values are placed in one block of memory, when their lifetimes are known beforehand.
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
  std::vector<int64_t> offsets;           ///< bytes, multiples of kAlign; lifetimes that meet do not overlap
  int64_t total = 0;                      ///< bytes of the whole block
  static constexpr int64_t kAlign = 256;  ///< as in a GPU's allocator: NVIDIA's libraries require workspaces with this alignment
};

/// An arrangement with a small total; the smallest possible one is an NP-hard problem (dynamic storage allocation). Each lifetime
/// takes the tightest gap that is free throughout: in order of decreasing size (Pisarchyk and Lee 2020,
/// https://arxiv.org/abs/2001.03288, "greedy by size"), of decreasing bytes times moments, or of their beginnings, as an allocator
/// without lookahead has to; the best of the three is returned. Deterministic, on every machine.
Arrangement arrange(std::span<const Lifetime> lifetimes);

/// The most bytes alive at one moment, in multiples of Arrangement::kAlign: a lower bound on the total of any arrangement.
int64_t most_alive(std::span<const Lifetime> lifetimes);

}  // namespace sheaf
