// Tokenizing texts in parts, on several threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "sheaf/core/parallel.h"
#include "sheaf/models/bpe.h"
#include "sheaf/models/word_cache.h"

namespace sheaf::models {

/// The tokens of all texts, each followed by `end_of_text` if there is one. `cut` says where a text may be split, as Tokenizer::cut;
/// encode(part, is_first, cache, scratch, out) appends the tokens of a part; is_first: it is its text's first.
template <class Text, class Cut, class Encode>
std::vector<int32_t> encode_in_parts(std::span<const Text> texts, std::optional<int32_t> end_of_text, Cut&& cut, Encode&& encode) {
  constexpr size_t kPart = size_t{1} << 20;  // about, per thread: of one large text, or of many small ones
  struct Piece {
    std::string_view text;
    bool is_first, is_last;
  };
  std::vector<Piece> pieces;
  std::vector<size_t> ends;   // of parts, in pieces
  size_t bytes = 0, all = 0;  // of the last part, of all
  for (const Text& text : texts) {
    const std::string_view whole = text;
    size_t at = 0;
    do {
      const size_t end = cut(whole, std::min(at + kPart, whole.size()));
      pieces.push_back({whole.substr(at, end - at), at == 0, end == whole.size()});
      bytes += end - at, all += end - at;
      at = end;
      if (bytes >= kPart) ends.push_back(pieces.size()), bytes = 0;
    } while (at < whole.size());
  }
  if (ends.empty() || ends.back() < pieces.size()) ends.push_back(pieces.size());
  std::vector<std::vector<int32_t>> parts(ends.size());
  parallel_for(static_cast<int64_t>(ends.size()), 1, [&](int64_t first, int64_t last) {
    WordCache cache(all);
    Bpe::Scratch scratch;
    for (auto p = static_cast<size_t>(first); p < static_cast<size_t>(last); ++p) {
      const size_t start = p ? ends[p - 1] : 0;
      size_t bytes_of_part = 0;
      for (size_t i = start; i < ends[p]; ++i) bytes_of_part += pieces[i].text.size();
      std::vector<int32_t>& out = parts[p];
      out.reserve(bytes_of_part / 3);
      for (size_t i = start; i < ends[p]; ++i) {
        encode(pieces[i].text, pieces[i].is_first, cache, scratch, out);
        if (pieces[i].is_last && end_of_text) out.push_back(*end_of_text);
      }
    }
  });
  if (parts.size() == 1) return std::move(parts[0]);
  std::vector<int32_t> tokens;
  size_t count = 0;
  for (const auto& part : parts) count += part.size();
  tokens.reserve(count);
  for (auto& part : parts) {
    tokens.insert(tokens.end(), part.begin(), part.end());
    part = {};
  }
  return tokens;
}

}  // namespace sheaf::models
