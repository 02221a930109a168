#include "sheaf/models/utf8.h"

#include <cstring>

namespace sheaf::models {
namespace {

// Whether text[at..] is the beginning of a character and nothing else.
bool broken_off(std::string_view text, size_t at) {
  const size_t have = text.size() - at;
  if (have >= 4) return false;
  // One more byte, or two or three, make a character of it.
  std::string tail(text.substr(at));
  const auto lead = static_cast<unsigned char>(tail[0]);
  const size_t needed = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || have >= needed) return false;
  // The second byte decides between valid and overlong or too large; if it is missing, one of these is right.
  for (char second : {'\x80', '\xA0'}) {
    std::string whole = tail;
    while (whole.size() < needed) whole += whole.size() == 1 ? second : '\x80';
    if (utf8_length(whole, 0) != 0) return true;
  }
  return false;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t word = 0x80;
    if (at + sizeof word <= text.size()) std::memcpy(&word, text.data() + at, sizeof word);
    if ((word & 0x8080808080808080) == 0) {
      at += sizeof word;
      continue;
    }
    const int length = utf8_length(text, at);
    if (length == 0) break;
    at += static_cast<size_t>(length);
  }
  return at;
}

std::string Utf8Assembler::add(std::string_view piece) {
  const std::string text = std::exchange(waiting_, {}) + std::string(piece);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (const int length = utf8_length(text, at)) {
      out += text.substr(at, length);
      at += static_cast<size_t>(length);
    } else if (broken_off(text, at)) {
      waiting_ = text.substr(at);
      break;
    } else {
      append_utf8(out, 0xFFFD);
      ++at;
    }
  }
  return out;
}

std::string Utf8Assembler::finish() {
  std::string out;
  for (size_t i = 0; i < waiting_.size(); ++i) append_utf8(out, 0xFFFD);
  waiting_.clear();
  return out;
}

}  // namespace sheaf::models
