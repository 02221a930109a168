// The memory that a rank must hold at the peak of a training step, by formula.
#pragma once

#include "sheaf/models/train_config.h"

namespace sheaf::bench {

/// Bytes at the peak of a step of GPT-2 in f32 with AdamW, on each of `ranks` ranks under config.sharding.strategy, without dropout,
/// with a unit per block and one for the rest. Derived term by term in memory_theory.cc.
double theoretical_peak(const models::TrainConfig& config, int ranks);

}  // namespace sheaf::bench
