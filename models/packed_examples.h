// PackedExamples: examples packed into windows of equal length, so that little of a batch is padding.
#pragma once

#include <cstdint>
#include <vector>

#include "sheaf/models/token_file.h"

namespace sheaf::models {

/// Packs whole examples into windows of `context` inputs and a last target: the longest first, each where it leaves the least room
/// (best fit decreasing; Ding et al., https://arxiv.org/abs/2404.10830, on why none is split). In a window they are in the order of
/// the sequence; the rest of it is filled with tokens that end an example and do not count. The first token of an example is never a
/// target: it would be predicted from another one.
///
/// An example longer than a window is truncated; one without anything to learn is left out.
class PackedExamples {
 public:
  /// Reads all tokens once. Throws DataError if these are not examples, or nothing in them is learned; ConfigError for a context below
  /// 1.
  PackedExamples(Tokens tokens, int64_t context);

  int64_t num_windows() const { return static_cast<int64_t>(targets_.size()); }
  /// Targets that count, of all windows together, and of one.
  int64_t num_targets() const { return num_targets_; }
  int64_t num_targets(int64_t window) const { return targets_[static_cast<size_t>(window)]; }
  /// Writes a window's inputs and targets, each [context].
  void fill(int64_t window, int32_t* inputs, int32_t* targets) const;

  int64_t num_examples() const { return static_cast<int64_t>(examples_.size()); }  ///< that are in a window
  int64_t num_tokens() const { return num_tokens_; }                               ///< their tokens in windows
  int64_t num_shortened() const { return shortened_; }                             ///< of them, truncated
  int64_t num_left_out() const { return left_out_; }                               ///< in addition to them

 private:
  struct Example {
    int64_t begin;
    int32_t length;   // tokens of it in its window, as inputs and, after the last input, as a target
    int32_t targets;  // of these, that count
  };
  std::vector<Example> find_examples();
  void pack(const std::vector<Example>& found);

  Tokens tokens_;
  int64_t context_;
  std::vector<Example> examples_;  // window by window
  std::vector<int64_t> ends_;      // of each window, in examples_
  std::vector<int64_t> targets_;   // of each window
  int64_t num_targets_ = 0, num_tokens_ = 0, shortened_ = 0, left_out_ = 0;
};

}  // namespace sheaf::models
