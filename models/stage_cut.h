// How a configuration cuts a model's blocks into the stages of a pipeline, and in which order these take turns.
#pragma once

#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// How many blocks the head and its loss, and MTP layers, count as where blocks are cut into stages: sharding.pipeline_head or, if that is
/// negative, as many as have as many operations (flops.h), in all of them with those that train.recompute block repeats. `vocab` replaces a
/// model.vocab of 0.
double head_in_blocks(const TrainConfig& config, int64_t vocab);

/// The turns of stage `stage` of `stages`, as sharding.pipeline_schedule says (ConfigError if it is unknown), with
/// sharding.pipeline_runs.
std::vector<Turn> turns_of(const TrainConfig& config, int stage, int stages, int64_t micro_batches);

/// For sharding.pipeline stages with sharding.pipeline_runs runs of blocks each. ConfigError if there are fewer blocks.
StageCut stage_cut(const TrainConfig& config, int64_t vocab);

}  // namespace sheaf::models
