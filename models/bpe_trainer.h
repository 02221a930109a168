// BpeTrainer: a byte-pair vocabulary of one's own, of texts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/models/word_counts.h"

namespace sheaf::models {

struct BpeTrainerOptions {
  int64_t vocab = 32768;      ///< tokens: special ones, the 256 bytes, and what joins
  int64_t min_frequency = 2;  ///< of two neighbours that join
  std::string pattern = "llama3";                        ///< cuts a text into words, WordPattern::of_name
  std::vector<std::string> special = {"<|endoftext|>"};  ///< never made from a text; the first ids, in this order
};

/// Counts the words of texts, then learns what to join in them (bpe_merges.h). The result is the same whatever the order of
/// the texts and the number of threads.
class BpeTrainer {
 public:
  /// Throws ConfigError for options that make no vocabulary.
  explicit BpeTrainer(BpeTrainerOptions options);

  /// Counts a text, or a part of it as safe_cut() makes them.
  void add(std::string_view text) { counts_.add(text); }
  /// Distinct words so far, without those of one byte.
  int64_t words() const { return counts_.size(); }

  /// The tokenizer.json of what was learned, from which make_huggingface_tokenizer() makes a tokenizer: ids and merges
  /// of Hugging Face's BpeTrainer with ByteLevel's alphabet. Null if `stop` has asked to end. Throws DataError if the
  /// texts have too few words for such a vocabulary.
  Json train(const std::function<bool()>& stop = [] { return false; }) const;

 private:
  BpeTrainerOptions options_;
  const WordPattern& pattern_;
  WordCounts counts_;
};

}  // namespace sheaf::models
