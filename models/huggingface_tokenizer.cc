#include "sheaf/models/huggingface_tokenizer.h"

#include <unordered_map>

#include "sheaf/core/file.h"
#include "sheaf/models/added_tokens.h"
#include "sheaf/models/character_pairs.h"
#include "sheaf/models/encode_parts.h"
#include "sheaf/models/huggingface_file.h"
#include "sheaf/models/nfc.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

Bpe bpe_of(const HuggingFaceFile& file) {
  return file.pattern ? Bpe::of_bytes(file.tokens, file.merges, file.whole_words)
                      : Bpe::of_characters(file.tokens, file.merges, file.bytes);
}

class HuggingFaceTokenizer : public Tokenizer {
 public:
  HuggingFaceTokenizer(HuggingFaceFile file, Json json)
      : json_(std::move(json)),
        file_(std::move(file)),
        bpe_(bpe_of(file_)) {
    for (const auto& token : file_.added) {
      const std::string content = token.normalized && file_.nfc ? nfc_of(token.content) : token.content;
      (token.normalized ? ordinary_.normalized : ordinary_.raw).add(content, token.id, token.special);
      (token.normalized ? all_.normalized : all_.raw).add(content, token.id, false);
      pairs_.add(content);
      if (!token.unknown.empty()) unknown_.emplace(token.id, token.unknown);
      if (std::string& shown = file_.shown[static_cast<size_t>(token.id)]; shown == token.content) shown = content;
    }
    least_vocab_ = vocab_size();
    while (std::ranges::any_of(file_.added, [this](const auto& t) { return t.special && t.id == least_vocab_ - 1; })) --least_vocab_;
    if (!file_.pattern)
      for (const std::string& token : file_.tokens) pairs_.add(token);
    for (const char* name : {"<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"})  // the last existing one
      for (const auto& token : file_.added)
        if (token.special && token.content == name) end_of_text_ = token.id;
    file_.tokens = {}, file_.merges = {};
  }

  std::string_view kind() const override { return "huggingface"; }
  int64_t vocab_size() const override { return static_cast<int64_t>(file_.shown.size()); }
  int64_t least_vocab() const override { return least_vocab_; }
  std::optional<int32_t> end_of_text() const override { return end_of_text_; }
  Json to_json() const override { return Json::Object{{"kind", "huggingface"}, {"file", json_}}; }

  size_t cut(std::string_view text, size_t at) const override {
    constexpr const char* kCuts = " \n";  // of safe_cut()
    if (file_.pattern) return ordinary_.raw.contain_any(kCuts) || ordinary_.normalized.contain_any(kCuts) ? text.size() : safe_cut(text, at);
    for (size_t i = std::max<size_t>(at, 1); i < text.size(); ++i)
      if (pairs_.part(text, i) && !ordinary_.raw.may_end_at(text, i) && !ordinary_.normalized.may_end_at(text, i)) return i;
    return text.size();
  }

  std::vector<int32_t> encode(std::string_view text, std::string_view) const override {
    return encode_all(std::span<const std::string_view>(&text, 1), true, std::nullopt);
  }
  std::vector<int32_t> encode_more(std::string_view text, std::string_view) const override {
    return encode_all(std::span<const std::string_view>(&text, 1), false, std::nullopt);
  }
  std::vector<int32_t> encode_at(std::string_view text, Place place, std::string_view origin) const override {
    return place == Place::behind_token ? encode_whole(text, place, ordinary_) : Tokenizer::encode_at(text, place, origin);
  }
  std::vector<int32_t> encode_special(std::string_view text, Place place, std::string_view origin) const override {
    std::vector<int32_t> tokens = encode_whole(text, place, all_);
    for (const int32_t id : tokens)
      if (const auto found = unknown_.find(id); found != unknown_.end())
        fail<DataError>("[tokenizer] ", origin, ": ", json_string(file_.shown[static_cast<size_t>(id)]), " has ", found->second,
                        " in tokenizer.json: Sheaf finds special tokens as a text has them, wherever they stand, and takes nothing else");
    return tokens;
  }
  Place place_behind(std::string_view text, int32_t last) const override {
    const auto ends_there = [&](const auto& token) { return token.id == last && text.ends_with(token.content); };
    return std::ranges::any_of(file_.added, ends_there) ? Place::behind_token : Place::within;
  }
  std::optional<int32_t> special_token(std::string_view name) const override {
    for (const auto& token : file_.added)
      if (token.special && token.content == name) return token.id;
    return std::nullopt;
  }
  std::vector<int32_t> encode_documents(std::span<const std::string> texts, std::string_view) const override {
    return encode_all(texts, true, end_of_text_);
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text = decode_more(tokens);
    if (file_.strips_prefix && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }
  std::string decode_more(std::span<const int32_t> tokens) const override {
    std::string text;
    for (const int32_t token : tokens) {
      check<DataError>(token >= 0 && token < vocab_size(), "[tokenizer] token ", token, " is outside the vocabulary of ",
                       vocab_size());
      text += file_.shown[static_cast<size_t>(token)];
    }
    return text;
  }

 private:
  // Found before and after the text is normalized.
  struct Added {
    AddedTokens raw, normalized;
  };
  // A thread's working memory.
  struct Work {
    const Added& added;
    WordCache& cache;
    Bpe::Scratch& scratch;
    std::vector<int32_t>& out;
  };

  static std::string nfc_of(const std::string& content) {
    return valid_utf8_prefix(content) == content.size() ? nfc(content) : content;
  }

  template <class Text>
  std::vector<int32_t> encode_all(std::span<const Text> texts, bool from_start, std::optional<int32_t> end) const {
    return encode_in_parts(
        texts, end, [this](std::string_view whole, size_t at) { return cut(whole, at); },
        [&](std::string_view part, bool is_first, WordCache& cache, Bpe::Scratch& scratch, std::vector<int32_t>& out) {
          encode_part(part, is_first && from_start ? Place::first : Place::within, {ordinary_, cache, scratch, out});
        });
  }

  std::vector<int32_t> encode_whole(std::string_view text, Place place, const Added& added) const {
    std::vector<int32_t> tokens;
    WordCache cache(text.size());
    Bpe::Scratch scratch;
    encode_part(text, place, {added, cache, scratch, tokens});
    return tokens;
  }

  void encode_part(std::string_view text, Place place, const Work& work) const {
    while (!text.empty()) {
      const size_t valid = valid_utf8_prefix(text);
      work.added.raw.for_each(
          text.substr(0, valid),
          [&](std::string_view piece) { normalize(piece, std::exchange(place, Place::within), work); },
          [&](int32_t id) { work.out.push_back(id), place = Place::behind_token; });
      if (valid < text.size()) bpe_.encode(text.substr(valid, 1), work.scratch, work.out), place = Place::within;
      text.remove_prefix(std::min(valid + 1, text.size()));
    }
  }

  void normalize(std::string_view text, Place place, const Work& work) const {
    std::string normal;
    if (file_.nfc && may_change_in_nfc(text)) text = normal = nfc(text);
    work.added.normalized.for_each(
        text, [&](std::string_view piece) { encode_piece(piece, std::exchange(place, Place::within), work); },
        [&](int32_t id) { work.out.push_back(id), place = Place::behind_token; });
  }

  void encode_piece(std::string_view text, Place place, const Work& work) const {
    const auto encode = [&](std::string_view word, std::vector<int32_t>& out) { bpe_.encode(word, work.scratch, out); };
    const auto word = [&](std::string_view word) { work.cache.append(word, work.out, encode); };
    if (file_.pattern) return file_.pattern->for_each_word(text, word);
    std::string spaced;
    if (takes_prefix(text, place)) text = spaced = ' ' + std::string(text);
    if (text.find(kSpaceMark) != std::string_view::npos) text = spaced = with_spaces(text);
    size_t begin = 0;
    uint32_t last = 0;
    for (size_t at = 0; at < text.size();) {
      const int length = std::max(1, utf8_length(text, at));
      const uint32_t next = code_point(text, at, length);
      if (at > 0 && ((next == ' ' && file_.each_space) || !pairs_.may_contain(last, next))) word(text.substr(begin, at - begin)), begin = at;
      last = next, at += static_cast<size_t>(length);
    }
    if (begin < text.size()) word(text.substr(begin));
  }

  bool takes_prefix(std::string_view text, Place place) const {
    using Prefix = HuggingFaceFile::Prefix;
    const bool spaced = text.starts_with(' ') || text.starts_with(kSpaceMark);
    switch (file_.prefix) {
      case Prefix::none: return false;
      case Prefix::text: return place == Place::first && !spaced;
      case Prefix::piece: return place != Place::within && !spaced;
      case Prefix::piece_always: return place != Place::within;
    }
    return false;
  }

  Json json_;
  HuggingFaceFile file_;
  Bpe bpe_;
  CharacterPairs pairs_;  // of tokens of characters and of added tokens: a text may be cut where there is none of them
  int64_t least_vocab_;
  Added ordinary_, all_;  // without and with special ones
  std::unordered_map<int32_t, std::string_view> unknown_;  // HuggingFaceFile::Added::unknown
  std::optional<int32_t> end_of_text_;
};

}  // namespace

std::shared_ptr<const Tokenizer> make_huggingface_tokenizer(const Json& json, const std::string& where) {
  HuggingFaceFile file = HuggingFaceFile::parse(json, where);
  try {
    return std::make_shared<HuggingFaceTokenizer>(std::move(file), reduced_huggingface_file(json));
  } catch (const DataError& e) {
    fail<DataError>("[tokenizer] ", where, ": model: ", e.what());
  }
}

std::shared_ptr<const Tokenizer> load_huggingface_tokenizer(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json", where = str("'", path, "'");
  return make_huggingface_tokenizer(Json::parse(File::open<DataError>(path).read_all(), where), where);
}

}  // namespace sheaf::models
