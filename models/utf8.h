// UTF-8, character by character.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "sheaf/core/json.h"

namespace sheaf::models {

/// The code point of the valid character of `length` bytes at text[at].
inline uint32_t code_point(std::string_view text, size_t at, int length) {
  constexpr uint32_t kLeadBits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t point = static_cast<unsigned char>(text[at]) & kLeadBits[length];
  for (int i = 1; i < length; ++i) point = point << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3f);
  return point;
}

inline void append_utf8(std::string& out, uint32_t point) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put(0x80 | (point & 0x3f));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3f));
    put(0x80 | (point & 0x3f));
  } else {
    put(0xF0 | point >> 18);
    put(0x80 | (point >> 12 & 0x3f));
    put(0x80 | (point >> 6 & 0x3f));
    put(0x80 | (point & 0x3f));
  }
}

/// Bytes of the longest valid prefix of `text`.
size_t valid_utf8_prefix(std::string_view text);

/// Makes displayable text from bytes that arrive in pieces: a character split at the end of a piece waits for the next one, and each
/// byte that belongs to no character is shown as U+FFFD.
class Utf8Assembler {
 public:
  /// The text that can be shown now.
  std::string add(std::string_view piece);
  /// The rest.
  std::string finish();

 private:
  std::string waiting_;
};

}  // namespace sheaf::models
