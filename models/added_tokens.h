// AddedTokens: the added tokens of a tokenizer.json, which are found in a text before anything else.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sheaf::models {

/// Immutable. Of several that begin at one place the longest is found. A special one is skipped: its text stays ordinary text, as
/// with `encode_special_tokens` of Hugging Face's tokenizers.
class AddedTokens {
 public:
  /// `content` must not be empty; only a token that is not special can ever be found.
  void add(const std::string& content, int32_t id, bool special);

  /// Whether none of the tokens can be found.
  bool empty() const { return !any_; }
  /// The one with this text that can be found.
  std::optional<int32_t> find(std::string_view content) const;
  /// Whether one of these characters occurs in a token, so that a text must not be split there.
  bool contain_any(std::string_view characters) const;
  /// Whether a token could end at text[at].
  bool may_end_at(std::string_view text, size_t at) const;

  /// Calls on_text(piece) and on_token(id) for the parts of the text, in order; no piece is empty.
  template <class OnText, class OnToken>
  void for_each(std::string_view text, OnText&& on_text, OnToken&& on_token) const {
    size_t begin = 0;
    if (any_)
      for (size_t at = 0; at < text.size();) {
        const Found found = find(text, at);
        at = found.end;
        if (found.id < 0) continue;
        if (found.begin > begin) on_text(text.substr(begin, found.begin - begin));
        on_token(found.id);
        begin = at;
      }
    if (begin < text.size()) on_text(text.substr(begin));
  }

 private:
  struct Found {
    size_t begin, end;
    int32_t id;  ///< -1: none, or a special one
  };
  /// The first token from `at` on; else the end of the text.
  Found find(std::string_view text, size_t at) const;

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> ids_;  // -1: special
  std::array<std::vector<size_t>, 256> lengths_;  // of tokens by their first byte, the longest first
  bool any_ = false;
};

}  // namespace sheaf::models
