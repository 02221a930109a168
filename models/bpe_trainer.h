// BpeTrainer: trains a byte-pair vocabulary on texts.
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
  int64_t min_frequency = 2;  ///< of two neighbours that are merged
  std::string pattern = "llama3";                        ///< splits a text into words, WordPattern::of_name
  std::vector<std::string> special = {"<|endoftext|>"};  ///< never made from a text; the first ids, in this order
};

/// Counts the words of texts, then learns which bytes to merge (bpe_merges.h). The result depends neither on the order of the texts
/// nor on the number of threads.
class BpeTrainer {
 public:
  /// Throws ConfigError for options that allow no vocabulary.
  explicit BpeTrainer(BpeTrainerOptions options);

  /// Counts a text, or a part of it as split by safe_cut().
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
