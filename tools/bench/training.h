// Training runs measured by several suites: their configurations by name, and random tokens.
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
/// The cases of the step suite on a CPU and on a GPU. GPT-2's vocabulary is padded to 50,304 on the GPU, as in llm.c, so that rows of
/// logits are aligned.
std::vector<TrainingCase> training_cases(Device device = {});

/// The configuration of a case by name, with further overrides; AdamW, clipping at norm 1, no dropout. Throws ConfigError where
/// `sheaf train` would.
models::TrainConfig training_config(std::string_view name,
                                    const std::vector<std::string>& more = {});

/// Overrides that make any case tiny, for quick runs where a GPU may be emulated.
std::vector<std::string> tiny_model();

/// A configuration that fits a GPU: the most sequences per micro-batch, up to 65,536 tokens, that fit into `bytes` according to the
/// plan; if not even one fits, the most layers.
struct Fitted {
  models::TrainConfig config;
  int64_t layers = 0;        ///< of the original model
  int64_t planned_peak = 0;  ///< bytes
};
/// Throws OutOfMemory if one layer does not fit.
Fitted fit_to_gpu(models::TrainConfig config, int64_t bytes);

/// Inputs and targets drawn uniformly from the vocabulary, the same in every run.
models::FillBatch random_tokens(const models::TrainConfig& config);

/// A world of this process alone, with `threads` of the calling thread's RankContext.
World solo_world();

}  // namespace sheaf::bench
