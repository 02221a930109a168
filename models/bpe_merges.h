// Which bytes to merge, learned from the words of a text: the training of a byte-pair vocabulary.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/word_counts.h"

namespace sheaf::models {

struct MergeOptions {
  int64_t tokens = 0;         ///< to stop at, the 256 bytes included
  int64_t min_frequency = 1;  ///< of a pair that is merged
  /// Whether such a token is allowed; pairs that would produce another one are never merged.
  std::function<bool(const std::string& bytes)> may_be = [](const std::string&) { return true; };
  /// Asked before each merge; true ends the work.
  std::function<bool()> stop = [] { return false; };
};

struct LearnedMerges {
  std::vector<std::string> tokens;  ///< bytes, by id; the single ones first, in the order of GPT-2's alphabet
  std::vector<BpePair> merges;      ///< the best first; each makes a token: those after the bytes, in this order
};

/// All words are split into bytes; then, repeatedly, the most frequent pair of neighbours is merged into one token wherever it
/// occurs, from the left. Of several equally frequent pairs, the one with the smaller left id is first, then the one with the smaller
/// right id. In "aaa" the pair "aa" occurs twice.
///
/// Deterministic, whatever the order of the words. Time is proportional to the number of merged occurrences, memory to the bytes of
/// the distinct words: some 24 for each. Throws DataError for 4 GiB of them.
LearnedMerges learn_merges(const WordCounts& words, const MergeOptions& options);

}  // namespace sheaf::models
