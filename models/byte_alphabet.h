// The alphabet of GPT-2's files: a printable character for each byte. If the byte is a printable character of Latin-1, that one; the
// others are the characters from U+0100 on. So a token is a word without spaces.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace sheaf::models {

std::string bytes_to_alphabet(std::string_view bytes);
/// Throws DataError naming the character that is not in the alphabet.
std::string alphabet_to_bytes(std::string_view text);
/// All bytes, in the order of their characters: that of the first 256 ids of GPT-2's vocabulary.
const std::array<unsigned char, 256>& bytes_in_alphabet();

}  // namespace sheaf::models
