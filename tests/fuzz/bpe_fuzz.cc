// libFuzzer target: the first bytes choose a vocabulary, the others are a text. Nothing of it is lost, and where it may be
// cut changes nothing.
#include <cstdint>
#include <cstdlib>

#include "sheaf/models/bpe_tokenizer.h"

using namespace sheaf::models;

namespace {

void check(const Tokenizer& tokenizer, std::string_view text) {
  const auto tokens = tokenizer.encode(text);
  if (tokenizer.decode(tokens) != text) std::abort();
  const size_t at = tokenizer.cut(text, text.size() / 2);
  auto parts = tokenizer.encode(text.substr(0, at));
  const auto rest = tokenizer.encode(text.substr(at));
  parts.insert(parts.end(), rest.begin(), rest.end());
  if (parts != tokens) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMerges = 16;
  if (size < 2 * kMerges) return 0;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  std::vector<BpePair> merges;
  // A second byte from 240 on means a merge before this one.
  for (size_t i = 0; i < kMerges; ++i) {
    const int32_t left = data[2 * i], right = data[2 * i + 1] < 240 || i == 0 ? data[2 * i + 1] : 256 + data[2 * i + 1] % static_cast<int>(i);
    if (static_cast<size_t>(right) >= tokens.size()) return 0;
    merges.emplace_back(left, right);
    tokens.push_back(tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)]);
  }
  const std::string_view text(reinterpret_cast<const char*>(data) + 2 * kMerges, size - 2 * kMerges);
  try {
    check(*make_gpt2_tokenizer(tokens, merges), text);
    check(*make_llama3_tokenizer(tokens), text);
  } catch (const sheaf::DataError&) {  // a token that is there twice
  }
  return 0;
}
