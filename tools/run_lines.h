// The lines that `sheaf train` prints at the start and at the end of a run.
#pragma once

#include <string>

#include "sheaf/models/trainer.h"

namespace sheaf::tools {

/// Prints the lines of a run, which continues even if standard output has been closed, or if nobody reads it: a pager that waits, a
/// terminal that is stopped, a collector of logs that hangs. Lines are then left out, after a second for the first.
class RunLines {
 public:
  void say(const std::string& line);

 private:
  void leave_out();

  bool broken_ = false;
  int64_t left_out_ = 0;  // since a line was last read
};

/// Of packed examples, beginning with `what`: how full windows are, and what happens to those that do not fit.
std::string examples_line(const std::string& what, const models::PackedExamples& e, int64_t context);

/// Describes processes, devices and data, and warns of what may surprise. On rank 0.
void describe_start(const models::TrainConfig& config, World& world, models::Trainer& trainer, RunLines& lines);
/// Prints a sample, collectives, measured peaks (and planned ones, as many as ten seconds allow), and losses, for newcomers. Collective:
/// all ranks compute the sample together.
void describe_end(const models::TrainConfig& config, World& world, models::Trainer& trainer, const models::TrainReport& result,
                  int threads, RunLines& lines);

}  // namespace sheaf::tools
