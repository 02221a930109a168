// What `sheaf train` says of a run at its start and at its end.
#pragma once

#include <string>

#include "sheaf/models/trainer.h"

namespace sheaf::tools {

/// The lines of a run, which goes on even if nobody can read them any more.
class RunLines {
 public:
  void say(const std::string& line);

 private:
  bool broken_ = false;
};

/// What runs where, on what data, and what may surprise. On rank 0.
void describe_start(const models::TrainConfig& config, World& world, models::Trainer& trainer, RunLines& lines);
/// A sample, collectives, the measured peaks next to the planned ones, and losses: what a newcomer wants to see. Collective: the
/// sample is computed by all ranks together.
void describe_end(const models::TrainConfig& config, World& world, models::Trainer& trainer, const models::TrainReport& result,
                  int threads, RunLines& lines);

}  // namespace sheaf::tools
