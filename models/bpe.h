// Bpe: a vocabulary of byte strings and the order in which pairs merge. Turns one word into tokens.
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

/// Immutable, so that threads may share one. A word begins as its bytes, or as its characters; the pair of neighbours with the best
/// rank is merged, the leftmost one of several, until no pair has a rank.
class Bpe {
 public:
  /// GPT-2's form: `merges` are the pairs that may merge, the best first; their concatenated bytes must be a token, too. Tokens that
  /// no merge produces and that are not single bytes are never produced from text: special tokens. Throws DataError naming the
  /// problem.
  static Bpe of_merges(std::vector<std::string> tokens, const std::vector<BpePair>& merges);
  /// tiktoken's form: any two tokens whose concatenated bytes are a token may merge; the rank is that token's id, and a word that is
  /// a token is encoded as that token. The tokens from `ordinary` on are special. Throws DataError.
  static Bpe of_ranks(std::vector<std::string> tokens, int64_t ordinary);

  /// Hugging Face's form of GPT-2's: some ids may have no token in the vocabulary, "" here, and with `whole_words` a word that is a
  /// token is encoded as that token, whatever merges say.
  static Bpe of_bytes(std::vector<std::string> tokens, const std::vector<BpePair>& merges, bool whole_words);
  /// SentencePiece's: words begin as characters; bytes that are not a character, or not one in the vocabulary, begin as the tokens of
  /// these bytes, whose ids are `bytes`.
  static Bpe of_characters(std::vector<std::string> tokens, const std::vector<BpePair>& merges,
                           const std::array<int32_t, 256>& bytes);

  Bpe(Bpe&&) = default;

  const std::vector<std::string>& tokens() const { return tokens_; }
  /// The id of these bytes, -1 if they are no token.
  int32_t id_of(std::string_view bytes) const;

  /// Memory that encode() reuses, for one thread.
  struct Scratch;
  /// Appends the tokens of `word` in time n log n for any word. Throws DataError for a word of 2 GiB.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

  /// A token longer than this is refused.
  static constexpr size_t kLongestToken = 4096;

 private:
  static constexpr uint32_t kNever = UINT32_MAX;
  struct Join {  // the result of a merge
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
  /// Splits `word` into its initial parts; returns how many there are.
  int32_t take_apart(std::string_view word, Scratch& scratch) const;
  /// Appends the tokens of `word` after all merges; returns the last pair that was merged.
  BpePair join(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int32_t> ids_;  // into tokens_
  std::array<int32_t, 256> bytes_{};
  bool characters_ = false;
  std::vector<Join> joins_;  // open addressing; a power of two, at least half of it free
  int shift_ = 0;
  std::unordered_map<std::string_view, int32_t> whole_;  // words that are tokens which merges do not produce
};

struct Bpe::Scratch {
  struct Part {
    int32_t id, next, previous;
    uint32_t rank;  // of this part and the next one
  };
  std::vector<Part> parts;
  std::vector<uint64_t> queue;  // rank and position, the least on top
};

}  // namespace sheaf::models
