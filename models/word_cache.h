// WordCache: the tokens of recent short words, which are most words of a text.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace sheaf::models {

/// For one thread. Each word has one possible line.
class WordCache {
 public:
  explicit WordCache(size_t text_bytes) : lines_(std::bit_ceil(std::clamp<size_t>(text_bytes / 16, 16, 1 << 14))) {}

  /// Appends the tokens of `word`, cached or from encode(word, out).
  template <class F>
  void append(std::string_view word, std::vector<int32_t>& out, F&& encode) {
    if (word.size() > sizeof(Line::word)) return encode(word, out);
    Line key;
    std::memcpy(key.word, word.data(), word.size());
    key.bytes = static_cast<uint8_t>(word.size());
    Line& line = lines_[place(key) & (lines_.size() - 1)];
    if (std::memcmp(line.word, key.word, sizeof key.word) != 0 || line.bytes != key.bytes) {
      const size_t before = out.size();
      encode(word, out);
      const size_t count = out.size() - before;
      if (count > std::size(key.ids)) return;
      key.count = static_cast<uint8_t>(count);
      std::copy(out.end() - static_cast<int64_t>(count), out.end(), key.ids);
      line = key;
      return;
    }
    out.insert(out.end(), line.ids, line.ids + line.count);
  }

 private:
  struct alignas(64) Line {
    char word[16] = {};
    int32_t ids[11] = {};
    uint8_t bytes = 0, count = 0;
  };
  static size_t place(const Line& key) {
    uint64_t halves[2];
    std::memcpy(halves, key.word, sizeof halves);
    const uint64_t mixed = (halves[0] ^ (halves[1] * 0xC2B2AE3D27D4EB4F)) * 0x9E3779B97F4A7C15;
    return static_cast<size_t>(mixed >> 32);
  }
  std::vector<Line> lines_;
};

}  // namespace sheaf::models
