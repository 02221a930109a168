// What a model makes of tokens that it is not trained on. All is collective, and the same on every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/choices.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/step_inputs.h"

namespace sheaf::models {

/// Mean loss over all windows, in nats per target that counts; `rows` of them at a time go through `inputs`.
double mean_loss(const ShardedModel& sharded, StepInputs& inputs, int64_t rows, const SequentialWindows& windows);

/// Of each row of `questions`: the sum over its continuation's tokens of the logarithm of the probability that the model gives them.
/// As many tokens at a time as a step of `config` has, in windows of its context, or of a half, a quarter, .. of it for rows that
/// fit: what is left of them is computed in vain.
std::vector<double> log_likelihoods(const ShardedModel& sharded, const TrainConfig& config, Device device, const ChoiceQuestions& questions);

}  // namespace sheaf::models
