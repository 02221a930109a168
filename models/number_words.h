// "0.7 web_*.bin 0.3 code_*.bin": numbers and patterns alternating, separated by spaces.
#pragma once

#include <charconv>
#include <sstream>
#include <string>
#include <vector>

namespace sheaf::models {

/// The words of a text, separated by spaces.
inline std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

/// Whether the whole word is a number, which is stored in `value`.
inline bool is_number(const std::string& word, double& value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size();
}

}  // namespace sheaf::models
