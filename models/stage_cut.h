// How a configuration divides a model's blocks into pipeline stages, and the order of their turns.
#pragma once

#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// How many blocks the head and its loss, and MTP layers, count for when blocks are divided into stages: sharding.pipeline_head or,
/// if that is negative, the number with as many operations (flops.h), including those that train.recompute block repeats. `vocab`
/// replaces a model.vocab of 0.
double head_in_blocks(const TrainConfig& config, int64_t vocab);

/// The turns of stage `stage` of `stages`, as sharding.pipeline_schedule says (ConfigError if it is unknown), with
/// sharding.pipeline_runs.
std::vector<Turn> turns_of(const TrainConfig& config, int stage, int stages, int64_t micro_batches);

/// For sharding.pipeline stages with sharding.pipeline_runs runs of blocks each. ConfigError if there are fewer blocks.
StageCut stage_cut(const TrainConfig& config, int64_t vocab);

}  // namespace sheaf::models
