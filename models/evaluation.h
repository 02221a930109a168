// What a model makes of tokens that it is not trained on. All is collective, and the same on every rank.
//
// `first`: nothing like it has run yet. The first batch of each shape then runs its collectives in turn (distributed/in_turn.h),
// as its kernels are new, and `first` becomes false. An island without a batch leaves it as it is.
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

/// For each row of `questions`: the sum over its continuation's tokens of the logarithm of the probability that the model gives them.
/// Computes as many tokens at a time as a step of `config` has, in windows of model.context tokens, or a half, a quarter, .. of that
/// for rows that fit; whole windows only if experts have a capacity, which depends on the window: the rest of them is computed in
/// vain. ShapeError for rows that are longer.
std::vector<double> log_likelihoods(const ChoiceQuestions& questions, const ShardedModel& sharded, const TrainConfig& config,
                                    Device device, bool& first);

}  // namespace sheaf::models
