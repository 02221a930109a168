// Training runs that several suites measure: their configurations by name, and tokens at random.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sheaf/distributed/world.h"
#include "sheaf/models/flops.h"
#include "sheaf/models/training_step.h"

namespace sheaf::bench {

/// Named like "gpt2-124m-f32-4x64": model, dtype, sequences x tokens of a step.
struct TrainingCase {
  std::string_view name;
  std::vector<std::string> overrides;  ///< as on the command line of `sheaf train`
};
/// What the step suite runs on a CPU and on a GPU. GPT-2's vocabulary is 50,304 on the GPU, so that
/// rows of logits are aligned, as llm.c has it.
std::vector<TrainingCase> training_cases(Device device = {});

/// The configuration of a case by name, with more overrides; AdamW, clipping at norm 1, no
/// dropout. Throws ConfigError for what `sheaf train` would refuse.
models::TrainConfig training_config(std::string_view name,
                                    const std::vector<std::string>& more = {});

/// Overrides that make any case tiny, for quick runs where a GPU may be emulated.
std::vector<std::string> tiny_model();

/// A configuration that fits a GPU: as many sequences in a micro-batch, up to 65,536 tokens, as by the plan fit into
/// `bytes`; if not even one does, as many layers.
struct Fitted {
  models::TrainConfig config;
  int64_t layers = 0;        ///< of the model before
  int64_t planned_peak = 0;  ///< bytes
};
/// Throws OutOfMemory if one layer does not fit.
Fitted fit_to_gpu(models::TrainConfig config, int64_t bytes);

/// Inputs and targets drawn evenly from the vocabulary, the same at every run.
models::FillBatch random_tokens(const models::TrainConfig& config);

/// A world of this process alone, with `threads` of the calling thread's RankContext.
World solo_world();

}  // namespace sheaf::bench
