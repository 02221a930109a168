#include "sheaf/models/byte_alphabet.h"

#include <cstdint>

#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

constexpr uint32_t kFirstOther = 0x100;

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

// The other bytes, in the order of their characters.
constexpr auto kOthers = [] {
  std::array<unsigned char, 68> others{};
  size_t count = 0;
  for (uint32_t byte = 0; byte < 256; ++byte)
    if (!stands_for_itself(byte)) others[count++] = static_cast<unsigned char>(byte);
  return others;
}();

constexpr auto kPoints = [] {
  std::array<uint32_t, 256> points{};
  for (uint32_t byte = 0; byte < 256; ++byte) points[byte] = byte;
  for (uint32_t i = 0; i < kOthers.size(); ++i) points[kOthers[i]] = kFirstOther + i;
  return points;
}();

constexpr auto kInOrder = [] {
  std::array<unsigned char, 256> bytes{};
  size_t count = 0;
  for (uint32_t byte = 0; byte < 256; ++byte)
    if (stands_for_itself(byte)) bytes[count++] = static_cast<unsigned char>(byte);
  for (const unsigned char other : kOthers) bytes[count++] = other;
  return bytes;
}();

}  // namespace

const std::array<unsigned char, 256>& bytes_in_alphabet() { return kInOrder; }

std::string bytes_to_alphabet(std::string_view bytes) {
  std::string text;
  for (char byte : bytes) append_utf8(text, kPoints[static_cast<unsigned char>(byte)]);
  return text;
}

std::string alphabet_to_bytes(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const int length = utf8_length(text, at);
    const uint32_t point = length ? code_point(text, at, length) : 0;
    if (point < kFirstOther && stands_for_itself(point)) {
      bytes += static_cast<char>(point);
    } else {
      if (point < kFirstOther || point >= kFirstOther + kOthers.size())
        fail<DataError>("[tokenizer] ", json_string(text), " has a character that stands for no byte");
      bytes += static_cast<char>(kOthers[point - kFirstOther]);
    }
    at += static_cast<size_t>(length);
  }
  return bytes;
}

}  // namespace sheaf::models
