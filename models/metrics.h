// A run's reports: metrics.jsonl for programs, a line per step for people.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "sheaf/core/append_file.h"

namespace sheaf::models {

/// A named number of one step.
struct Metric {
  std::string name;
  std::variant<int64_t, double> value;
  Metric(std::string name, double value) : name(std::move(name)), value(value) {}
  Metric(std::string name, int64_t value) : name(std::move(name)), value(value) {}
};

/// Appends to metrics.jsonl, one object per line: {"step":10,"loss":2.25,...}; docs/output.md has the fields. Doubles are
/// written with the fewest digits that read back to the same bits; NaN and infinities as null with a flag:
/// {"loss":null,"loss_nonfinite":"nan"}. Used by rank 0 only; not thread-safe.
class MetricsWriter {
 public:
  /// Starts the file, or continues it after the last whole line of a step up to `last_step`: what follows (lines of a run that was
  /// killed after its last checkpoint, some truncated by that) is dropped, so that every step is recorded once. The default drops all.
  /// The lines that stay are not read. Throws IoError.
  explicit MetricsWriter(const std::string& path, int64_t last_step = -1);

  /// Writes one line. Throws IoError.
  void write(int64_t step, std::span<const Metric> metrics);
  void write(int64_t step, std::initializer_list<Metric> metrics) { write(step, std::span(metrics.begin(), metrics.size())); }
  /// Makes all lines so far durable. Called before a checkpoint commits: its steps must never be lost after that.
  void sync() { file_->sync(); }

 private:
  std::unique_ptr<AppendFile> file_;
};

/// The contents of a console line.
struct Progress {
  int64_t step = 0, steps = 0;  ///< done, and in all
  double loss = 0, lr = 0, grad_norm = 0;
  double tokens_per_second = 0;  ///< of all ranks
  double seconds_left = -1;      ///< negative: not known yet
  double loss_scale = 0;         ///< of the next step; 0: the loss is not scaled
  int64_t skipped = 0;           ///< how many of the `steps_since` the previous line were skipped
  int64_t steps_since = 1;
};

/// "step  120/2000  loss 2.1234  lr 1.00e-03  norm 0.87  12,345 tok/s  left 3m12s": no colour, no cursor movement, so it reads the
/// same in a terminal and in a log. If a step was skipped, "  skipped, loss scale 32768" follows, for several "  2 of 10 skipped,
/// loss scale 16384".
std::string progress_line(const Progress& progress);

}  // namespace sheaf::models
