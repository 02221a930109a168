// Tokenizers: text to token ids and back, exactly: decode(encode(text)) == text, except for what a tokenizer.json normalizes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/json.h"

namespace sheaf::models {

/// Immutable, so that threads may share one. Ids are 0 to vocab_size() - 1.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string_view kind() const = 0;  ///< "char", "byte", "gpt2", "llama3", "huggingface"
  virtual int64_t vocab_size() const = 0;
  /// The vocabulary a model must have: without the last special tokens, which models without images may lack (Gemma 3's smallest).
  virtual int64_t least_vocab() const { return vocab_size(); }
  /// Throws DataError naming the part that cannot be encoded and its byte offset; `origin` names the text in it.
  virtual std::vector<int32_t> encode(std::string_view text, std::string_view origin = "text") const = 0;
  /// The same for a text that continues one that was split by cut().
  virtual std::vector<int32_t> encode_more(std::string_view text, std::string_view origin = "text") const {
    return encode(text, origin);
  }
  /// What precedes a text: nothing, an added token (behind which some tokenizers put a space, as before a text), or other text.
  enum class Place { first, behind_token, within };
  virtual std::vector<int32_t> encode_at(std::string_view text, Place place, std::string_view origin = "text") const {
    return place == Place::first ? encode(text, origin) : encode_more(text, origin);
  }
  /// The tokens of a text that may contain special tokens by name, as a chat's frame does. Throws DataError also for a special token
  /// that a tokenizer.json finds otherwise than by its name alone (lstrip, rstrip, single_word, normalized).
  virtual std::vector<int32_t> encode_special(std::string_view text, Place place = Place::first, std::string_view origin = "text") const {
    return encode_at(text, place, origin);
  }
  /// The place of what follows this text, the last of whose tokens is `last`.
  virtual Place place_behind(std::string_view /*text*/, int32_t /*last*/) const { return Place::within; }
  /// The special token of that name, which encode_special() finds.
  virtual std::optional<int32_t> special_token(std::string_view /*name*/) const { return std::nullopt; }
  /// The tokens of the texts, one after another, each followed by end_of_text() if there is one.
  virtual std::vector<int32_t> encode_documents(std::span<const std::string> texts, std::string_view origin = "text") const;
  /// Throws DataError for an id outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  /// The same for tokens that follow others.
  virtual std::string decode_more(std::span<const int32_t> tokens) const { return decode(tokens); }
  /// The token between documents, which no text contains.
  virtual std::optional<int32_t> end_of_text() const { return std::nullopt; }
  /// The first offset from `at` on where a text may be split: its tokens are those of encode() of the first part and encode_more() of
  /// the second. By default its end.
  virtual size_t cut(std::string_view text, size_t /*at*/) const { return text.size(); }
  /// tokenizer_from_json() creates an equal tokenizer from this.
  virtual Json to_json() const = 0;
};

/// One token per Unicode code point that occurs in `corpus`, ids in the order of code points. Throws DataError with the
/// offset of the first byte that is not UTF-8, or if the corpus is empty.
std::shared_ptr<const Tokenizer> make_char_tokenizer(std::string_view corpus, std::string_view origin = "corpus");
/// One token per byte, 256 in all: encodes anything.
std::shared_ptr<const Tokenizer> make_byte_tokenizer();

/// A tokenizer that does not depend on a text: "byte", or "gpt2", "llama3" (bpe_tokenizer.h) or "huggingface"
/// (huggingface_tokenizer.h) from the published files in `folder`. Throws ConfigError for another name or without a folder, DataError
/// for invalid files.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& name, const std::string& folder = "");

/// {"kind": "char", "characters": "..."}, {"kind": "byte"}, or those of bpe_tokenizer.h and huggingface_tokenizer.h. Throws
/// DataError; an unknown kind is named.
std::shared_ptr<const Tokenizer> tokenizer_from_json(const Json& json);

}  // namespace sheaf::models
