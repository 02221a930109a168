// Options that are lists: "0.7 web_*.bin 0.3 code_*.bin", numbers and patterns alternating, or "1 1.05 1.1", numbers; separated by spaces.
#pragma once

#include <charconv>
#include <sstream>
#include <string>
#include <vector>

#include "sheaf/core/error.h"

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

/// The numbers of a text. Throws ConfigError naming `option` for other words.
inline std::vector<double> numbers_of(const char* option, const std::string& text) {
  std::vector<double> numbers;
  for (const std::string& word : words_of(text))
    check<ConfigError>(is_number(word, numbers.emplace_back()), "[model] ", option, " '", text,
                       "': numbers separated by spaces, \"1 1.05 1.1\"; found '", word, "'");
  return numbers;
}
/// The inverse, by the shortest words that are read back as the same numbers.
inline std::string text_of_numbers(const std::vector<double>& numbers) {
  std::string text;
  for (const double x : numbers) {
    char word[32];
    const auto end = std::to_chars(word, word + sizeof word, x).ptr;
    text.append(text.empty() ? "" : " ").append(word, end);
  }
  return text;
}

}  // namespace sheaf::models
