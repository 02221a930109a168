// Bpe: a vocabulary of byte strings and which two of them join first. Turns one word into tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sheaf/models/bpe_tokenizer.h"

namespace sheaf::models {

/// Immutable, so that threads may share one. A word begins as its bytes, or as its characters; of all neighbours that may
/// join, the pair of the best rank does, the leftmost one of several, until none may.
class Bpe {
 public:
  /// GPT-2's form: `merges` are the pairs that may join, the best first; their bytes together must be a token, too.
  /// Tokens that no merge makes and that are not single bytes are never made from text: special tokens. Throws
  /// DataError naming what is wrong.
  static Bpe of_merges(std::vector<std::string> tokens, const std::vector<BpePair>& merges);
  /// tiktoken's form: any two tokens may join whose bytes together are a token, whose id is its rank, and a word that is
  /// a token is that token. The tokens from `ordinary` on are special. Throws DataError.
  static Bpe of_ranks(std::vector<std::string> tokens, int64_t ordinary);

  /// Hugging Face's form of GPT-2's: some ids may have no token in the vocabulary, "" here, and with `whole_words` a word
  /// that is a token is that token, whatever merges say.
  static Bpe of_bytes(std::vector<std::string> tokens, const std::vector<BpePair>& merges, bool whole_words);
  /// SentencePiece's: words begin as characters; what is not in the vocabulary, or is no character, begins as the tokens
  /// of its bytes, whose ids are `bytes`.
  static Bpe of_characters(std::vector<std::string> tokens, const std::vector<BpePair>& merges,
                           const std::array<int32_t, 256>& bytes);

  Bpe(Bpe&&) = default;

  const std::vector<std::string>& tokens() const { return tokens_; }
  /// The id of these bytes, -1 if they are no token.
  int32_t id_of(std::string_view bytes) const;

  /// Memory that encode() uses again, of one thread.
  struct Scratch;
  /// Appends the tokens of `word` in time n log n for any word. Throws DataError for a word of 2 GiB.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

  /// A token longer than this is refused.
  static constexpr size_t kLongestToken = 4096;

 private:
  static constexpr uint32_t kNever = UINT32_MAX;
  struct Join {  // what a pair becomes
    uint64_t pair = UINT64_MAX;
    uint32_t rank = kNever;
    int32_t id = -1;
  };

  explicit Bpe(std::vector<std::string> tokens, bool may_lack = false);
  void add_merges(const std::vector<BpePair>& merges);
  void take_bytes(int64_t ordinary);
  void reserve_joins(size_t count);
  /// False if the pair has a rank already.
  bool add_join(BpePair pair, uint32_t rank, int32_t id);
  const Join& find_join(int32_t left, int32_t right) const;
  /// Makes the first parts of `word`; returns how many there are.
  int32_t take_apart(std::string_view word, Scratch& scratch) const;
  /// Appends what joins make of `word`; returns the last pair that was joined.
  BpePair join(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int32_t> ids_;  // into tokens_
  std::array<int32_t, 256> bytes_{};
  bool characters_ = false;
  std::vector<Join> joins_;  // open addressing; a power of two, at least half of it free
  int shift_ = 0;
  std::unordered_map<std::string_view, int32_t> whole_;  // words that are tokens, but not made by joins
};

struct Bpe::Scratch {
  struct Part {
    int32_t id, next, previous;
    uint32_t rank;  // of this part and the next one
  };
  std::vector<Part> parts;
  std::vector<uint64_t> queue;  // rank and place, the least on top
};

}  // namespace sheaf::models
