// Tokenizers: text to token ids and back, exactly: decode(encode(text)) == text.
#pragma once

#include <cstdint>
#include <memory>
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
  virtual std::string_view kind() const = 0;  ///< "char", "byte"
  virtual int64_t vocab_size() const = 0;
  /// Throws DataError naming what cannot be encoded and its byte offset; `origin` names the text in it.
  virtual std::vector<int32_t> encode(std::string_view text, std::string_view origin = "text") const = 0;
  /// Throws DataError for an id outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  /// What tokenizer_from_json() makes an equal tokenizer of.
  virtual Json to_json() const = 0;
};

/// One token per Unicode code point that occurs in `corpus`, ids in the order of code points. Throws DataError with the
/// offset of the first byte that is not UTF-8, or if the corpus is empty.
std::shared_ptr<const Tokenizer> make_char_tokenizer(std::string_view corpus, std::string_view origin = "corpus");
/// One token per byte, 256 in all: encodes anything.
std::shared_ptr<const Tokenizer> make_byte_tokenizer();

/// {"kind": "char", "characters": "..."} or {"kind": "byte"}. Throws DataError; an unknown kind is named.
std::shared_ptr<const Tokenizer> tokenizer_from_json(const Json& json);
/// Reads such a file; throws DataError.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& path);

}  // namespace sheaf::models
