// Random training (random_training_test.cc): a run of `sheaf train` of a tiny model, drawn in two parts.
//
//   task = model, batch, optimizer, schedule: everything that determines the numbers
//   way  = ranks, what each holds, and everything else that must not change them
#pragma once

#include <string>

#include "sheaf/models/training_step.h"
#include "sheaf/tests/core/draw.h"

namespace sheaf::testing {

constexpr int kRandomSteps = 5;

/// On one rank, as described above: micro-batches are part of it only if the loss depends on them.
models::TrainConfig drawn_task(Draw& draw);
/// Makes widths multiples of `unit`, also on each of the ranks that share them.
void draw_widths(models::ModelConfig& model, int64_t unit, Draw& draw);

struct Way {
  int world = 1, threads = 1;   // of each rank
  double bytes_per_second = 0;  // of links, while ranks compute and rows are sent in pieces; 0: they copy themselves
  models::TrainConfig config;
};
/// Another way to do the same; a few of them are refused. It keeps micro-batches on which the loss depends.
Way drawn_way(const models::TrainConfig& task, Draw& draw);
/// Another one on the same mesh, with the same sums: the f32 bits are the same.
Way drawn_twin(const Way& way, Draw& draw);

/// Draws the dtypes in which weights and gradients are communicated.
void draw_sent(models::ShardingConfig& sharding, Draw& draw);
/// Whether its numbers differ from those of f32 by more than the order of sums.
bool rounds(const models::TrainConfig& config);

/// The flags of `sheaf train` for it, without its data.
std::string to_string(const Way& way);

/// The seeds of a test's cases: SHEAF_SEEDS of them, or `usual`, starting at SHEAF_SEED, or 0.
std::vector<int> random_seeds(int usual);

/// Tokens of `count` samples from `first` on, with occasional ends of documents; with data.examples not all targets count.
void fill_random(const models::TrainConfig& config, int64_t first, int64_t count, int32_t* inputs, int32_t* targets);
/// Options for a step that reads them; `config` must outlive it.
models::TrainingStepOptions options_for(const models::TrainConfig& config, DType masters);

}  // namespace sheaf::testing
