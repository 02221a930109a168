// tokenizer.json, which Hugging Face's `tokenizers` writes for a tokenizer: the parts that Sheaf supports. Anything else is refused
// by its key, since ignoring it would change tokens.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/word_pattern.h"

namespace sheaf::models {

/// A byte-pair tokenizer of bytes, with a splitting pattern (GPT-2's, Llama 3's, Qwen's, ...), or one of characters, as from
/// SentencePiece (Llama 2's, Mistral 7B's), with byte fallback.
struct HuggingFaceFile {
  struct Added {
    int32_t id;
    std::string content;
    bool special;              ///< made only from texts that may contain special tokens
    bool normalized;           ///< found in the normalized text
    std::string_view unknown;  ///< the key, such as lstrip, by which special ones are found otherwise than Sheaf finds them; "": none
  };
  /// Whether a space is put before a text, and before each piece that follows an added token.
  enum class Prefix {
    none,
    text,          ///< before the text, if it does not begin with one
    piece,         ///< before each piece that does not begin with one
    piece_always,  ///< before each piece
  };

  std::vector<std::string> tokens;  ///< of the vocabulary, as bytes, by id; "": never produced from words
  std::vector<std::string> shown;   ///< the text of every id: of the vocabulary's tokens their bytes, also if they are added ones
  std::vector<BpePair> merges;      ///< the best first
  std::vector<Added> added;
  bool nfc = false;  ///< texts are normalized first

  const WordPattern* pattern = nullptr;  ///< of tokens of bytes; null: of characters
  bool whole_words = false;              ///< a word that is a token is that token

  std::array<int32_t, 256> bytes{};  ///< of characters: the tokens of bytes
  Prefix prefix = Prefix::none;
  bool each_space = false;     ///< each space begins a word, not only the first of several
  bool strips_prefix = false;  ///< decoding drops the space at the beginning

  /// Throws DataError that names the problem, `where` and the key.
  static HuggingFaceFile parse(const Json& json, const std::string& where);
};

inline constexpr std::string_view kSpaceMark = "\u2581";  ///< what SentencePiece writes for a space
/// A text with spaces for these marks.
std::string with_spaces(std::string_view text);

/// The members of a tokenizer.json that parse() reads.
Json reduced_huggingface_file(const Json& json);

}  // namespace sheaf::models
