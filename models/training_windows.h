// Which tokens a training step sees: a pure function of the seed and of samples' numbers, so that a resumed run, another world size
// and another accumulation read the same data, and there is no position that could be lost.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "sheaf/models/packed_examples.h"
#include "sheaf/models/token_mixture.h"

namespace sheaf::models {

/// In which order windows of a sequence are read.
enum class WindowOrder {
  shuffled,  ///< in epochs: all windows, contiguous, each once, in a new order for each epoch
  random,    ///< with replacement, each at a random position (nanoGPT): an epoch's number of them misses a third of all tokens
};

/// By its name; throws ConfigError for another.
WindowOrder window_order(std::string_view name);

/// The start positions of the windows of one sequence.
///
/// Shuffled: an epoch has windows_per_epoch() windows of `context` tokens, contiguous from a random offset below `context` on, which
/// leaves out less than 2 context tokens at both ends; other epochs have other boundaries. Their order is a permutation that needs no
/// memory: a Feistel network on the fewest even number of bits, iterated until the result is below the number of windows (Black and
/// Rogaway, Ciphers with arbitrary finite domains, 2002).
class WindowStarts {
 public:
  /// `tokens` is more than `context`.
  WindowStarts(int64_t tokens, int64_t context, uint64_t seed, WindowOrder order);
  /// For existing windows, numbered from 0: the order in which they are read.
  static WindowStarts of_windows(int64_t count, uint64_t seed, WindowOrder order) { return {count + 1, 1, seed, order}; }
  /// The start of the sequence's window number `index`, from 0: a window's inputs are the `context` tokens from there on, its targets
  /// are shifted by one.
  int64_t operator()(int64_t index) const;
  int64_t windows_per_epoch() const { return windows_; }

 private:
  int64_t tokens_, context_, windows_;
  uint64_t seed_;
  WindowOrder order_;
};

/// The windows of a mixture. Sample number i of a run (the global index: step · batch + index in the global batch) is window number
/// place(i).index of its source. Those of examples are PackedExamples, each once in an epoch, too.
class TrainingWindows {
 public:
  /// Throws DataError if a source holds fewer than context + 1 tokens, or examples without anything to learn.
  TrainingWindows(TokenMixture tokens, int64_t context, uint64_t seed, WindowOrder order = WindowOrder::shuffled);

  const TokenMixture& tokens() const { return tokens_; }
  int64_t windows_per_epoch(int s) const { return sources_[static_cast<size_t>(s)].starts.windows_per_epoch(); }
  /// How often `samples` samples read the windows of source s.
  double epochs(int s, int64_t samples) const;
  /// How many first samples of a run read the windows of source s `epochs` times; a part of an epoch is rounded up to
  /// whole windows.
  int64_t samples_of(int s, double epochs) const;
  /// The start of sample `index` in its source; for examples, the number of the window.
  int64_t start(int64_t index) const;
  /// Writes samples [first, first + count): inputs and targets, each [count, context], row-major.
  void fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;
  /// How many targets of samples [first, first + count) count: all, except for examples.
  int64_t num_targets(int64_t first, int64_t count) const;
  /// Of source s; null if it holds no examples.
  const PackedExamples* examples(int s) const;

 private:
  struct Source {
    WindowStarts starts;
    std::optional<PackedExamples> examples;
  };
  TokenMixture tokens_;
  int64_t context_;
  std::vector<Source> sources_;
};

}  // namespace sheaf::models
