// Training runs that several suites measure: their configurations by name, tokens at random, and
// how many operations a step takes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sheaf/distributed/world.h"
#include "sheaf/models/training_step.h"

namespace sheaf::bench {

/// "gpt2-124m-f32-4x64" and its like: model, dtype, sequences x tokens of a step.
struct TrainingCase {
  std::string_view name;
  std::vector<std::string> overrides;  ///< as on the command line of `sheaf train`
};
/// What the step suite runs.
std::vector<TrainingCase> training_cases();

/// The configuration of a case by name, with more overrides; AdamW, clipping at norm 1, no
/// dropout. Throws ConfigError for what `sheaf train` would refuse.
models::TrainConfig training_config(std::string_view name,
                                    const std::vector<std::string>& more = {});

/// Inputs and targets drawn evenly from the vocabulary, the same at every run.
models::FillBatch random_tokens(const models::TrainConfig& config);

/// Floating-point operations of one step, by the causal convention (llm.c, Megatron): 6 for each
/// parameter in a product (2 forward, 4 backward; the tied head counts, the lookup of the embedding
/// does not) and token, and 6 L T C for each token's attention (12 L T C halved by the mask).
double flops_per_step(const models::TrainConfig& config);

/// A world of this process alone, with `threads` of the calling thread's RankContext.
World solo_world();

}  // namespace sheaf::bench
