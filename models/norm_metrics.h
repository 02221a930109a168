// Norms of gradients and weights, by name, for the metrics of a step (train.log_norms).
#pragma once

#include <vector>

#include "sheaf/models/metrics.h"
#include "sheaf/models/training_step.h"

namespace sheaf::models {

/// "grad_norm/NAME" and "weight_norm/NAME" for each trained unit, or for each of its parameters: norms of the step's gradients before
/// clipping (TrainingStep::Result::grad_norms), and of the current weights. The same on every rank, with islands the means;
/// collective.
std::vector<Metric> norm_metrics(TrainingStep& step, const Tensor& grad_norms, bool by_parameter);

}  // namespace sheaf::models
