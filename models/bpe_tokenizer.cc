#include "sheaf/models/bpe_tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "sheaf/models/added_tokens.h"
#include "sheaf/models/bpe.h"
#include "sheaf/models/byte_alphabet.h"
#include "sheaf/models/encode_parts.h"
#include "sheaf/models/utf8.h"
#include "sheaf/models/word_pattern.h"

namespace sheaf::models {
namespace {

class BpeTokenizer : public Tokenizer {
 public:
  BpeTokenizer(std::string kind, const WordPattern& pattern, Bpe bpe, std::vector<BpePair> merges, int64_t listed,
               std::string_view end_of_text)
      : kind_(std::move(kind)),
        pattern_(pattern),
        bpe_(std::move(bpe)),
        merges_(std::move(merges)),
        listed_(listed),
        end_of_text_(bpe_.id_of(end_of_text)) {
    const auto add_special = [this](int32_t id) { special_.add(bpe_.tokens()[static_cast<size_t>(id)], id, /*special=*/false); };
    for (auto id = static_cast<int32_t>(listed_); id < vocab_size(); ++id) add_special(id);
    if (end_of_text_ >= 0 && end_of_text_ < listed_) add_special(end_of_text_);
  }

  std::string_view kind() const override { return kind_; }
  int64_t vocab_size() const override { return static_cast<int64_t>(bpe_.tokens().size()); }
  std::optional<int32_t> end_of_text() const override {
    return end_of_text_ < 0 ? std::nullopt : std::optional(end_of_text_);
  }
  size_t cut(std::string_view text, size_t at) const override { return safe_cut(text, at); }

  std::vector<int32_t> encode(std::string_view text, std::string_view) const override {
    return encode_all(std::span<const std::string_view>(&text, 1), std::nullopt);
  }
  std::vector<int32_t> encode_special(std::string_view text, Place, std::string_view origin) const override {
    std::vector<int32_t> tokens;
    const auto append = [&](std::string_view piece) {
      const std::vector<int32_t> ids = encode(piece, origin);
      tokens.insert(tokens.end(), ids.begin(), ids.end());
    };
    special_.for_each(text, append, [&](int32_t id) { tokens.push_back(id); });
    return tokens;
  }
  std::optional<int32_t> special_token(std::string_view name) const override { return special_.find(name); }
  std::vector<int32_t> encode_documents(std::span<const std::string> texts, std::string_view) const override {
    return encode_all(texts, end_of_text());
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (int32_t token : tokens) {
      check<DataError>(token >= 0 && token < vocab_size(), "[tokenizer] token ", token,
                       " is outside the vocabulary of ", vocab_size());
      text += bpe_.tokens()[static_cast<size_t>(token)];
    }
    return text;
  }

  Json to_json() const override {
    std::string tokens, merges;
    const auto append = [&](std::string& list, int64_t id) {
      if (!list.empty()) list += ' ';
      list += bytes_to_alphabet(bpe_.tokens()[static_cast<size_t>(id)]);
    };
    for (int64_t id = 0; id < listed_; ++id) append(tokens, id);
    for (const auto& [left, right] : merges_) {
      append(merges, left);
      append(merges, right);
    }
    Json json = Json::Object{{"kind", kind_}, {"tokens", tokens}};
    if (kind_ == "gpt2") json.set("merges", merges);
    return json;
  }

 private:
  template <class Text>
  std::vector<int32_t> encode_all(std::span<const Text> texts, std::optional<int32_t> end) const {
    return encode_in_parts(
        texts, end, [](std::string_view whole, size_t at) { return safe_cut(whole, at); },
        [&](std::string_view part, bool, WordCache& cache, Bpe::Scratch& scratch, std::vector<int32_t>& out) {
          encode_part(part, cache, scratch, out);
        });
  }

  // Bytes that are not UTF-8 are separate words.
  void encode_part(std::string_view text, WordCache& cache, Bpe::Scratch& scratch, std::vector<int32_t>& out) const {
    const auto encode = [&](std::string_view word, std::vector<int32_t>& to) { bpe_.encode(word, scratch, to); };
    while (!text.empty()) {
      const size_t valid = valid_utf8_prefix(text);
      pattern_.for_each_word(text.substr(0, valid), [&](std::string_view word) { cache.append(word, out, encode); });
      if (valid < text.size()) bpe_.encode(text.substr(valid, 1), scratch, out);
      text.remove_prefix(std::min(valid + 1, text.size()));
    }
  }

  std::string kind_;
  const WordPattern& pattern_;
  Bpe bpe_;
  std::vector<BpePair> merges_;  // gpt2
  int64_t listed_;               // tokens that the JSON form lists: all but Llama 3's special ones
  int32_t end_of_text_;
  AddedTokens special_;
};

// Tokens in GPT-2's alphabet, a space between two.
std::vector<std::string> words_of(std::string_view list) {
  std::vector<std::string> words;
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    words.push_back(alphabet_to_bytes(list.substr(0, end)));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return words;
}

// Meta's names, of Llama 3; later releases have other names for some that were reserved.
std::vector<std::string> llama3_special_tokens() {
  const auto reserved = [](int i) { return str("<|reserved_special_token_", i, "|>"); };
  std::vector<std::string> names = {"<|begin_of_text|>",   "<|end_of_text|>",   reserved(0), reserved(1), reserved(2),
                                    reserved(3),           "<|start_header_id|>", "<|end_header_id|>", reserved(4),
                                    "<|eot_id|>"};
  for (int i = 5; names.size() < 256; ++i) names.push_back(reserved(i));
  return names;
}

}  // namespace

std::shared_ptr<const Tokenizer> make_gpt2_tokenizer(std::vector<std::string> tokens,
                                                     std::vector<BpePair> merges) {
  Bpe bpe = Bpe::of_merges(std::move(tokens), merges);
  const auto size = static_cast<int64_t>(bpe.tokens().size());
  return std::make_shared<BpeTokenizer>("gpt2", WordPattern::gpt2(), std::move(bpe), std::move(merges), size,
                                        "<|endoftext|>");
}

std::shared_ptr<const Tokenizer> make_llama3_tokenizer(std::vector<std::string> tokens) {
  const auto ordinary = static_cast<int64_t>(tokens.size());
  for (std::string& name : llama3_special_tokens()) tokens.push_back(std::move(name));
  return std::make_shared<BpeTokenizer>("llama3", WordPattern::llama3(), Bpe::of_ranks(std::move(tokens), ordinary),
                                        std::vector<BpePair>(), ordinary, "<|end_of_text|>");
}

std::shared_ptr<const Tokenizer> bpe_from_json(const Json& json) {
  const std::string& kind = json.at("kind").as_string();
  check<DataError>(kind == "gpt2" || kind == "llama3", "[tokenizer] ", json_string(kind), " is no byte-pair tokenizer");
  const std::vector<std::string> tokens = words_of(json.at("tokens").as_string());
  if (kind == "llama3") return make_llama3_tokenizer(tokens);
  std::unordered_map<std::string_view, int32_t> ids;
  for (size_t id = 0; id < tokens.size(); ++id) ids.emplace(tokens[id], static_cast<int32_t>(id));
  const std::vector<std::string> halves = words_of(json.at("merges").as_string());
  check<DataError>(halves.size() % 2 == 0, "[tokenizer] the merges are not pairs");
  std::vector<BpePair> merges;
  const auto id_of = [&](const std::string& token) {
    const auto found = ids.find(token);
    if (found == ids.end()) fail<DataError>("[tokenizer] a merge of ", json_string(token), ", which is no token");
    return found->second;
  };
  for (size_t i = 0; i < halves.size(); i += 2) merges.emplace_back(id_of(halves[i]), id_of(halves[i + 1]));
  return make_gpt2_tokenizer(tokens, std::move(merges));
}

}  // namespace sheaf::models
