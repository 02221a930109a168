// Runs in f16 that skip steps, and how to compare two of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {

inline constexpr int kF16Steps = 12;

inline models::TrainConfig in_f16(const char* type = "gpt2") {
  models::TrainConfig c = tiny_config();
  c.model.type = type;
  c.train.dtype = "f16";
  return c;
}
/// The scale doubles in each step until something overflows: of twelve steps several are skipped.
inline models::TrainConfig at_the_limit(const char* type = "gpt2") {
  models::TrainConfig c = in_f16(type);
  c.train.loss_scale = 0x1p21;
  c.train.loss_scale_interval = 1;
  return c;
}

/// Bits of losses and parameters, with the scaler's state; the norm of a skipped step is -1, as NaN compares unequal to itself.
struct F16Run {
  TrainedRun trained;
  optim::LossScaler::State scaler;
};
/// EXPECTs that some steps are skipped, and that all ranks skip the same ones.
inline F16Run train_f16(const models::TrainConfig& config, int world, Device device = {}) {
  F16Run run;
  std::vector<std::optional<int64_t>> applied(static_cast<size_t>(world));
  run.trained = train_tiny(config, world, kF16Steps, [&](models::TrainingStep& step) {
    const int rank = RankContext::current().rank;
    applied[static_cast<size_t>(rank)] = step.optimizer().applied_steps();
    if (rank == 0) run.scaler = step.scaler()->state();
  }, device);
  for (float& norm : run.trained.norms)
    if (!std::isfinite(norm)) norm = -1;
  for (const auto& count : applied) EXPECT_EQ(count, kF16Steps - run.scaler.skipped_steps);
  EXPECT_EQ(std::ranges::count(run.trained.norms, -1.0f), run.scaler.skipped_steps);
  EXPECT_GE(run.scaler.skipped_steps, 2);
  EXPECT_LE(run.scaler.skipped_steps, kF16Steps - 4);
  return run;
}
inline void expect_same(const F16Run& a, const F16Run& b) {
  expect_same_bits(a.trained, b.trained);
  EXPECT_EQ(a.scaler, b.scaler);
}

}  // namespace sheaf::testing
