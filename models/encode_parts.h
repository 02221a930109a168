// A text in parts, which threads turn into tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "sheaf/core/parallel.h"
#include "sheaf/models/bpe.h"
#include "sheaf/models/word_cache.h"

namespace sheaf::models {

/// The tokens of all parts. `cut` says where a text may be cut, as Tokenizer::cut; encode(part, is_first, cache, scratch,
/// out) appends the tokens of one.
template <class Cut, class Encode>
std::vector<int32_t> encode_in_parts(std::string_view text, Cut&& cut, Encode&& encode) {
  constexpr size_t kPart = size_t{1} << 20;  // about
  std::vector<size_t> ends;
  for (size_t at = 0; at < text.size();) ends.push_back(at = cut(text, std::min(at + kPart, text.size())));
  std::vector<std::vector<int32_t>> parts(ends.size());
  parallel_for(static_cast<int64_t>(ends.size()), 1, [&](int64_t first, int64_t last) {
    WordCache cache(text.size());
    Bpe::Scratch scratch;
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
      const size_t begin = i ? ends[i - 1] : 0;
      encode(text.substr(begin, ends[i] - begin), i == 0, cache, scratch, parts[i]);
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
