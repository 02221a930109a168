#include "sheaf/models/named_files.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"

namespace sheaf::models {
namespace {

bool is_name(std::string_view text) {
  const auto is_part = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_'; };
  return !text.empty() && std::ranges::all_of(text, is_part);
}

}  // namespace

std::vector<NamedFile> named_files(const std::string& text, const char* what) {
  std::istringstream in(text);
  std::string word;
  const bool named = in >> word && is_name(std::string_view(word).substr(0, word.find('='))) && word.find('=') != std::string::npos;
  if (!named || path_exists(text)) return {{"", text}};
  std::vector<NamedFile> out;
  do {
    const size_t at = word.find('=');
    const std::string name = word.substr(0, at);
    check<ConfigError>(at != std::string::npos && is_name(name), "[data] '", text, "': ", what, " are names and files, ",
                       "\"a=FILE b=FILE\"; found '", word, "'");
    for (const NamedFile& other : out)
      check<ConfigError>(other.name != name, "[data] '", text, "': two ", what, " have the name '", name, "'");
    out.push_back({name, word.substr(at + 1)});
  } while (in >> word);
  return out;
}

}  // namespace sheaf::models
