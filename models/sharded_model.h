// ShardedModel: the model of a configuration, sharded over the ranks of a world.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/distributed/world.h"
#include "sheaf/models/decoder.h"
#include "sheaf/models/step_inputs.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Without memory until materialize(). Movable; the model's address does not change.
struct ShardedModel {
  Mesh mesh;     ///< of this rank's island (train.islands): all ranks if there is one
  Mesh islands;  ///< with the axis "island" before those of `mesh`; undefined if there is one island
  StageCut cut;
  std::unique_ptr<Decoder> model;
  int64_t layers = 0, runs = 1;  ///< blocks of the model, and runs of them in each stage

  int num_islands() const { return islands.spec ? islands.size("island") : 1; }
  int island() const { return islands.spec ? islands.coordinate("island") : 0; }
  /// Sums `values` over all islands, in place, and waits. Collective.
  void sum_over_islands(std::span<double> values) const;

  /// The block at which run number `run` of `of` runs of this rank's stage ends.
  int64_t end_of_run(int64_t run, int64_t of) const;
  /// model.loss() of each micro-batch, in order; on a ring of stages as many at once as fit. Outside of any recording.
  std::vector<Tensor> losses(const StepInputs& inputs, const CrossEntropyOptions& options) const;
};

/// The number of ranks of each island (train.islands) of `world`: ConfigError, prefixed with `context`, if they would not be equal.
int ranks_of_island(const char* context, const TrainConfig& config, int world);

struct ShardedModelOptions {
  std::vector<int64_t> blocks = {};  ///< of each run of each stage, instead of stage_cut()'s
  bool frozen = false;               ///< it is not trained: weights are stored in the compute dtype
};

/// By the model and [sharding] of `config`, and train.dtype, which are checked: ConfigError for options that do not fit each other or
/// the ranks. `vocab` replaces a model.vocab of 0. Collective.
ShardedModel sharded_model(const TrainConfig& config, int64_t vocab, World& world, const ShardedModelOptions& options = {});

}  // namespace sheaf::models
