// The search for configurations: which of the many ways to distribute a model over a number of ranks fit their memory, and the
// estimated time of a step for each (step_time.h).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "sheaf/models/step_time.h"

namespace sheaf::models {

struct PlannedConfig {
  TrainConfig config;
  StepTime time;
  /// Its difference from the given configuration, as options: "--sharding.tensor 2 --train.recompute selective".
  std::string options;
};

struct ConfigSearchOptions {
  std::set<std::string> keep;  ///< keys of options ("sharding.tensor") that are not varied
  int refine = 6;              ///< how many of the best choices are refined
  int threads = 1;             ///< that plan concurrently, one configuration each
};

struct ConfigSearchResult {
  std::vector<PlannedConfig> fitting;  ///< all that fit, the fastest first
  /// The fastest of these, followed by each that takes less memory than all before it. Their peaks are those of the ranks that hold
  /// most (plan.h).
  std::vector<PlannedConfig> front;
  int planned = 0;          ///< number of plans made
  int64_t least_bytes = 0;  ///< if none fits: the memory that the smallest of them takes
};

/// Varies sharding.pipeline, .pipeline_runs, .pipeline_schedule, .tensor, .context, .context_comm, .experts, .replicas, .secondary,
/// .strategy, train.micro_batches and train.recompute. It does not try everything: for each choice of axes the fewest micro-batches
/// that fit, and more as long as that reduces recomputation, under a suitable strategy; then, for the best of these, the other
/// strategies and neighbouring micro-batches, and for the best pipeline several runs of blocks and zero_bubble. ConfigError if no
/// choice of axes suits the model, the batch and the number of ranks: with the reason for which the last one was refused.
ConfigSearchResult search_configs(const TrainConfig& config, int64_t vocab, int world, const Machine& machine,
                                  const ConfigSearchOptions& options = {});

}  // namespace sheaf::models
