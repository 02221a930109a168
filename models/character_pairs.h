// CharacterPairs: which characters stand side by side in tokens of characters. No merge joins two that do so in no token.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "sheaf/models/utf8.h"

namespace sheaf::models {

/// A set of pairs. U+2581, SentencePiece's mark, counts as the space for which it stands.
class CharacterPairs {
 public:
  CharacterPairs() : kept_(size_t{1} << kBits) {}

  void add(std::string_view token) {
    uint32_t last = 0;
    for (size_t at = 0; at < token.size();) {
      const int length = std::max(1, utf8_length(token, at));
      const uint32_t next = without_mark(code_point(token, at, length));
      if (at > 0) kept_[place(last, next)] = true;
      last = next, at += static_cast<size_t>(length);
    }
  }
  /// False: in no token. True also of a few that are in none, since only a hash of each is kept.
  bool may_contain(uint32_t left, uint32_t right) const { return kept_[place(left, right)]; }
  /// Whether a character begins at text[at] that is in no token with what is before it; at > 0. Bytes that are no character are in none.
  bool part(std::string_view text, size_t at) const {
    const auto goes_on = [&](size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80; };
    if (goes_on(at)) return false;
    size_t before = at - 1;
    while (before > 0 && goes_on(before)) --before;
    const int left = utf8_length(text, before), right = utf8_length(text, at);
    if (right == 0 || before + static_cast<size_t>(left) != at) return true;
    return !may_contain(without_mark(code_point(text, before, left)), without_mark(code_point(text, at, right)));
  }

 private:
  static constexpr int kBits = 20;
  static uint32_t without_mark(uint32_t point) { return point == 0x2581 ? ' ' : point; }
  static size_t place(uint32_t left, uint32_t right) {
    return static_cast<size_t>((uint64_t{left} << 32 | right) * 0x9E3779B97F4A7C15 >> (64 - kBits));
  }
  std::vector<bool> kept_;
};

}  // namespace sheaf::models
