// libFuzzer target: the first bytes choose a vocabulary, the others are a text. Encoding loses nothing, except by normalization, and the
// places where a text may be cut do not change the result.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/byte_alphabet.h"
#include "sheaf/models/huggingface_tokenizer.h"

using namespace sheaf::models;
using sheaf::Json;

namespace {

void check(const Tokenizer& tokenizer, std::string_view text, bool exact = true) {
  const auto tokens = tokenizer.encode(text);
  if (exact && tokenizer.decode(tokens) != text) std::abort();
  const size_t at = tokenizer.cut(text, text.size() / 2);
  auto parts = tokenizer.encode(text.substr(0, at));
  const auto rest = tokenizer.encode_more(text.substr(at));
  parts.insert(parts.end(), rest.begin(), rest.end());
  if (parts != tokens) std::abort();
}

Json object(const char* type) { return Json::Object{{"type", type}}; }

// A tokenizer.json of bytes, or of characters, of which those above 127 are no tokens.
Json huggingface(const std::vector<std::string>& tokens, const std::vector<BpePair>& merges, bool characters) {
  const auto name = [&](const std::string& token) { return characters ? token : bytes_to_alphabet(token); };
  Json::Object vocab;
  Json::Array pairs;
  const auto put = [&](const std::string& token) { vocab.emplace_back(token, static_cast<int64_t>(vocab.size())); };
  for (int byte = 0; characters && byte < 256; ++byte) {
    constexpr const char* kDigits = "0123456789ABCDEF";
    put(std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">");
  }
  for (const std::string& token : tokens)
    if (!characters || std::all_of(token.begin(), token.end(), [](char c) { return c >= 0; })) put(name(token));
  for (const auto& [left, right] : merges) {
    const std::string &a = tokens[static_cast<size_t>(left)], &b = tokens[static_cast<size_t>(right)];
    if (!characters || (a[0] >= 0 && b[0] >= 0)) pairs.push_back(Json::Array{name(a), name(b)});
  }
  Json model = object("BPE");
  model.set("vocab", vocab).set("merges", pairs).set("byte_fallback", characters);
  Json file;
  file.set("model", model);
  const auto added = [&](const char* content, size_t id, bool special) {
    return Json::Object{{"id", static_cast<int64_t>(id)}, {"content", content}, {"special", special}, {"normalized", false}};
  };
  file.set("added_tokens", Json::Array{added("<t>", vocab.size(), false), added("<t><s>", vocab.size() + 1, true)});
  if (characters) {
    const Json from = Json::Object{{"String", "\u2581"}};
    file.set("pre_tokenizer", Json::Object{{"type", "Metaspace"}, {"prepend_scheme", "first"}, {"split", false}});
    file.set("decoder", Json::Object{{"type", "Sequence"},
                                     {"decoders", Json::Array{Json::Object{{"type", "Replace"}, {"pattern", from}, {"content", " "}},
                                                              object("ByteFallback"), object("Fuse")}}});
  } else {
    file.set("normalizer", object("NFC"));
    file.set("pre_tokenizer", Json::Object{{"type", "ByteLevel"}, {"add_prefix_space", false}});
    file.set("decoder", object("ByteLevel"));
  }
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMerges = 16;
  if (size < 2 * kMerges) return 0;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  std::vector<BpePair> merges;
  // A second byte from 240 on refers to an earlier merge.
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
    for (const bool characters : {false, true})
      check(*make_huggingface_tokenizer(huggingface(tokens, merges, characters), "fuzz"), text, false);
  } catch (const sheaf::DataError&) {  // a token that occurs twice
  }
  return 0;
}
