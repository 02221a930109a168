// Training steps of ranks that are threads of this process, timed by rank 0's clock.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "sheaf/distributed/run_local.h"
#include "sheaf/models/training_step.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

struct StepsToTime {
  models::TrainConfig config;
  int ranks = 1;
  LocalOptions links = {};
  models::TrainingStepOptions options = {};
  int64_t at_once = 1;  ///< steps of a sample
  int64_t warm = 3;     ///< samples that are not timed
  /// Bytes that a rank has received so far; null: TimedSteps::megabytes stays 0.
  std::function<double(const models::TrainingStep&)> received = {};
};

struct TimedSteps {
  std::vector<double> seconds;  ///< of a step, one number per sample
  double megabytes = 0;         ///< received by rank 0 in a step
};

/// Times `samples` samples of each of `all` in up to three rounds, each of which builds one after the other: building takes longer
/// than a step of a small model.
std::vector<TimedSteps> time_steps(const std::vector<StepsToTime>& all, int samples);

/// time_steps() of the line's own steps, which become its samples, and of its peer's.
std::vector<TimedSteps> compare_steps(Line& line, int samples, const StepsToTime& own, std::string peer, const StepsToTime& of_peer);

/// A number of rounds for `samples` samples, and of samples in each: groups alternate that take long to start.
struct Rounds {
  explicit Rounds(int samples) : count(std::min(3, (samples + 3) / 4)), samples_each(samples / count) {}
  int count, samples_each;
};

}  // namespace sheaf::bench
