#include "sheaf/models/tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>

#include "sheaf/core/file.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

// Calls f(code point, offset) for every character; throws DataError at the first byte that is not UTF-8.
template <class F>
void for_each_character(std::string_view text, std::string_view origin, F&& f) {
  for (size_t at = 0; at < text.size();) {
    const int length = utf8_length(text, at);
    if (length == 0) {
      char byte[8];
      std::snprintf(byte, sizeof byte, "0x%02x", static_cast<unsigned char>(text[at]));
      fail<DataError>("[tokenizer] ", origin, ": byte ", byte, " at offset ", at, " is not valid UTF-8");
    }
    f(code_point(text, at, length), at);
    at += static_cast<size_t>(length);
  }
}

std::string describe(uint32_t point) {
  std::string character;
  append_utf8(character, point);
  char number[16];
  std::snprintf(number, sizeof number, "U+%04X", point);
  return json_string(character) + " (" + number + ")";
}

void check_token(int32_t token, int64_t vocab) {
  if (token < 0 || token >= vocab) {
    fail<DataError>("[tokenizer] token ", token, " is outside the vocabulary of ", vocab);
  }
}

class CharTokenizer : public Tokenizer {
 public:
  explicit CharTokenizer(std::vector<uint32_t> sorted_points) : points_(std::move(sorted_points)) {
    for (size_t i = 0; i < points_.size(); ++i) ids_.emplace(points_[i], static_cast<int32_t>(i));
  }
  std::string_view kind() const override { return "char"; }
  int64_t vocab_size() const override { return static_cast<int64_t>(points_.size()); }

  std::vector<int32_t> encode(std::string_view text, std::string_view origin) const override {
    std::vector<int32_t> tokens;
    tokens.reserve(text.size());
    for_each_character(text, origin, [&](uint32_t point, size_t at) {
      const auto id = ids_.find(point);
      if (id == ids_.end()) {
        fail<DataError>("[tokenizer] ", origin, ": character ", describe(point), " at offset ", at,
                        " is not in the vocabulary of ", points_.size(), " characters");
      }
      tokens.push_back(id->second);
    });
    return tokens;
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (int32_t token : tokens) {
      check_token(token, vocab_size());
      append_utf8(text, points_[static_cast<size_t>(token)]);
    }
    return text;
  }

  Json to_json() const override {
    std::string characters;
    for (uint32_t point : points_) append_utf8(characters, point);
    return Json::Object{{"kind", "char"}, {"characters", characters}};
  }

 private:
  std::vector<uint32_t> points_;  // id to code point, ascending
  std::unordered_map<uint32_t, int32_t> ids_;
};

class ByteTokenizer : public Tokenizer {
 public:
  std::string_view kind() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text, std::string_view) const override {
    std::vector<int32_t> tokens(text.size());
    std::transform(text.begin(), text.end(), tokens.begin(), [](char c) { return static_cast<unsigned char>(c); });
    return tokens;
  }
  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (int32_t token : tokens) {
      check_token(token, 256);
      text += static_cast<char>(token);
    }
    return text;
  }
  size_t cut(std::string_view text, size_t at) const override { return std::min(at, text.size()); }
  Json to_json() const override { return Json::Object{{"kind", "byte"}}; }
};

}  // namespace

std::vector<int32_t> Tokenizer::encode_documents(std::span<const std::string> texts, std::string_view origin) const {
  std::vector<int32_t> tokens;
  for (const std::string& text : texts) {
    const std::vector<int32_t> ids = encode(text, origin);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    if (const auto end = end_of_text()) tokens.push_back(*end);
  }
  return tokens;
}

std::shared_ptr<const Tokenizer> make_char_tokenizer(std::string_view corpus, std::string_view origin) {
  check<DataError>(!corpus.empty(), "[tokenizer] ", origin, " is empty");
  std::vector<bool> seen(0x110000);
  for_each_character(corpus, origin, [&](uint32_t point, size_t) { seen[point] = true; });
  std::vector<uint32_t> points;
  for (uint32_t point = 0; point < seen.size(); ++point) {
    if (seen[point]) points.push_back(point);
  }
  return std::make_shared<CharTokenizer>(std::move(points));
}

std::shared_ptr<const Tokenizer> make_byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& name, const std::string& folder) {
  if (name == "byte") return make_byte_tokenizer();
  if (name != "gpt2" && name != "llama3" && name != "huggingface")
    fail<ConfigError>("[tokenizer] unknown tokenizer '", name, "'; known are ",
                      name == "char" ? "" : "char, which is made from a text, ", "byte, gpt2, llama3 and huggingface");
  if (folder.empty())
    fail<ConfigError>("[tokenizer] ", name, " needs a folder with its published files: ",
                      name == "gpt2" ? "encoder.json and vocab.bpe" : name == "llama3" ? "tokenizer.model" : "tokenizer.json");
  if (name == "huggingface") return load_huggingface_tokenizer(folder);
  return name == "gpt2" ? load_gpt2_tokenizer(folder) : load_llama3_tokenizer(folder);
}

std::shared_ptr<const Tokenizer> tokenizer_from_json(const Json& json) {
  const std::string& kind = json.at("kind").as_string();
  if (kind == "byte") return make_byte_tokenizer();
  if (kind == "gpt2" || kind == "llama3") return bpe_from_json(json);
  if (kind == "huggingface") return make_huggingface_tokenizer(json.at("file"), "the tokenizer's file");
  check<DataError>(kind == "char", "[tokenizer] unknown kind ", json_string(kind),
                   "; known are char, byte, gpt2, llama3 and huggingface");
  const std::string& characters = json.at("characters").as_string();
  std::vector<uint32_t> points;
  for_each_character(characters, "the vocabulary", [&](uint32_t point, size_t at) {
    check<DataError>(points.empty() || points.back() < point, "[tokenizer] the characters are not in ascending order at",
                     " offset ", at);
    points.push_back(point);
  });
  check<DataError>(!points.empty(), "[tokenizer] the vocabulary is empty");
  return std::make_shared<CharTokenizer>(std::move(points));
}

}  // namespace sheaf::models
