// tokenizer.json: what Hugging Face's `tokenizers` writes of a tokenizer, read as what Sheaf can do of it. Whatever else it
// asks for is refused by its key, for it would give other tokens.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/word_pattern.h"

namespace sheaf::models {

/// A byte-pair tokenizer of bytes, cut by a pattern (GPT-2's, Llama 3's, Qwen's, ...), or one of characters, as
/// SentencePiece makes them (Llama 2's, Mistral 7B's), which has bytes for those that it does not know.
struct HuggingFaceFile {
  struct Added {
    int32_t id;
    std::string content;
    bool special;     ///< made from a text only by who may write special tokens
    bool normalized;  ///< found in the normalized text
    bool bare;        ///< found wherever it stands, and nothing beside it is taken
  };
  /// Whether a space is put before a text, and before each piece behind an added token.
  enum class Prefix {
    none,
    text,             ///< before the text, if it does not begin with one
    piece,            ///< before each piece that does not begin with one
    piece_always,     ///< before each piece
  };

  std::vector<std::string> tokens;  ///< of the vocabulary, as bytes, by id; "" is none of words
  std::vector<std::string> shown;   ///< what every id becomes in a text
  std::vector<BpePair> merges;      ///< the best first
  std::vector<Added> added;
  bool nfc = false;                 ///< texts are normalized first

  const WordPattern* pattern = nullptr;  ///< of tokens of bytes; null: of characters
  bool whole_words = false;              ///< a word that is a token is that token

  std::array<int32_t, 256> bytes{};  ///< of characters: the tokens of bytes
  Prefix prefix = Prefix::none;
  bool each_space = false;           ///< each space begins a word, not only the first of several
  bool strips_prefix = false;        ///< what is decoded lacks the space that it begins with

  /// Throws DataError: what is wrong, with `where` and the key.
  static HuggingFaceFile parse(const Json& json, const std::string& where);
};

inline constexpr std::string_view kSpaceMark = "\u2581";  ///< what SentencePiece writes for a space
/// A text with spaces for these marks.
std::string with_spaces(std::string_view text);

/// Of a tokenizer.json what parse() reads.
Json reduced_huggingface_file(const Json& json);

}  // namespace sheaf::models
