// PairIndex: numbers by pairs of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "sheaf/models/bpe_tokenizer.h"

namespace sheaf::models {

/// A hash table in open addressing.
class PairIndex {
 public:
  PairIndex() : lines_(64), shift_(64 - 6) {}

  /// -1 if the pair has none.
  int32_t find(BpePair pair) const { return lines_[place_of(key_of(pair))].number; }
  /// Gives a number, from 0 on, to a pair that has none.
  void add(BpePair pair, int32_t number) {
    if (2 * ++size_ > lines_.size()) grow();
    const uint64_t key = key_of(pair);
    lines_[place_of(key)] = {key, number};
  }

 private:
  struct Line {
    uint64_t key = 0;
    int32_t number = -1;
  };
  static uint64_t key_of(BpePair pair) {
    return static_cast<uint64_t>(static_cast<uint32_t>(pair.first)) << 32 | static_cast<uint32_t>(pair.second);
  }
  size_t place_of(uint64_t key) const {
    size_t at = (key * 0x9E3779B97F4A7C15) >> shift_;
    while (lines_[at].number >= 0 && lines_[at].key != key) at = (at + 1) & (lines_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<Line> old(2 * lines_.size());
    old.swap(lines_);
    --shift_;
    for (const Line& line : old)
      if (line.number >= 0) lines_[place_of(line.key)] = line;
  }

  std::vector<Line> lines_;  // a power of two, at least half of it free
  int shift_;
  size_t size_ = 0;
};

}  // namespace sheaf::models
