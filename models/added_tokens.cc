#include "sheaf/models/added_tokens.h"

#include <algorithm>

namespace sheaf::models {

void AddedTokens::add(const std::string& content, int32_t id, bool special) {
  ids_[content] = special ? -1 : id;
  any_ |= !special;
  std::vector<size_t>& lengths = lengths_[static_cast<unsigned char>(content[0])];
  if (std::find(lengths.begin(), lengths.end(), content.size()) == lengths.end()) lengths.push_back(content.size());
  std::sort(lengths.begin(), lengths.end(), std::greater());
}

std::optional<int32_t> AddedTokens::find(std::string_view content) const {
  const auto found = ids_.find(content);
  return found == ids_.end() || found->second < 0 ? std::nullopt : std::optional(found->second);
}

bool AddedTokens::contain_any(std::string_view characters) const {
  return any_ && std::any_of(ids_.begin(), ids_.end(),
                             [&](const auto& token) { return token.first.find_first_of(characters) != std::string::npos; });
}

bool AddedTokens::may_end_at(std::string_view text, size_t at) const {
  if (!any_) return false;
  for (const auto& lengths : lengths_)
    for (const size_t length : lengths)
      if (length <= at && ids_.contains(text.substr(at - length, length))) return true;
  return false;
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t at) const {
  for (; at < text.size(); ++at)
    for (const size_t length : lengths_[static_cast<unsigned char>(text[at])]) {
      if (length > text.size() - at) continue;
      if (const auto found = ids_.find(text.substr(at, length)); found != ids_.end())
        return {at, at + length, found->second};
    }
  return {text.size(), text.size(), -1};
}

}  // namespace sheaf::models
