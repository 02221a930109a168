// Evaluating a model on tokens that it is not trained on. Everything is collective, and the same on every rank.
//
// `first`: no evaluation has run yet. The first batch of each shape then runs its collectives in turn (distributed/in_turn.h), as its
// kernels are new, and `first` becomes false. An island without a batch does not change it.
#pragma once

#include <cstdint>
#include <vector>

#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/choices.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/step_inputs.h"

namespace sheaf::models {

/// Mean loss over all windows, in nats per target that counts, as many at a time as `inputs` has rows.
double loss_over(const SequentialWindows& windows, const ShardedModel& sharded, StepInputs& inputs, bool& first);

/// For each row of `questions`: the log-probability of its continuation, summed over tokens. Computes as many tokens at a time as a
/// step of `config` has, in windows of model.context tokens, or a half, a quarter, .. of that for rows that fit; whole windows only
/// if experts have a capacity, which depends on the window: then the padding is computed in vain. ShapeError for longer rows.
std::vector<double> log_likelihoods(const ChoiceQuestions& questions, const ShardedModel& sharded, const TrainConfig& config,
                                    Device device, bool& first);

}  // namespace sheaf::models
