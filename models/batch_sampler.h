// Which tokens an evaluation sees, and which of them count.
#pragma once

#include <cstdint>
#include <optional>

#include "sheaf/models/training_windows.h"

namespace sheaf::models {

/// Consecutive windows over the whole sequence, for evaluation: every token but the first is a target exactly once. The
/// last window may be partial; its tail, and every window from num_windows() on, has input 0 and target kIgnoreIndex,
/// so ranks can evaluate batches of equal shape. Of examples, the windows are PackedExamples, in an order that makes the first of
/// them a sample of all.
class SequentialWindows {
 public:
  /// At most `max_targets` targets, all of them if 0; for examples, as many whole windows, but at least one. Throws DataError
  /// if `tokens` holds fewer than two, or examples without anything to learn.
  SequentialWindows(Tokens tokens, int64_t context, int64_t max_targets = 0);

  int64_t context() const { return context_; }
  int64_t num_windows() const { return num_windows_; }
  /// Targets that count, in all windows together: the divisor of a mean loss.
  int64_t num_targets() const { return num_targets_; }
  /// Null if these are not examples.
  const PackedExamples* examples() const { return examples_ ? &*examples_ : nullptr; }
  /// Writes windows [first, first + count): inputs and targets, each [count, context], row-major. Returns how many of
  /// the targets count.
  int64_t fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;

 private:
  int64_t fill_window(int64_t i, int32_t* inputs, int32_t* targets) const;

  Tokens tokens_;
  int64_t context_;
  int64_t num_windows_, num_targets_;
  std::optional<PackedExamples> examples_;
  std::optional<WindowStarts> order_;  // of their windows
};

}  // namespace sheaf::models
