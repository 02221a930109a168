// Learning rates as plain functions of the step, which counts from 0.
#pragma once

#include <cstdint>

namespace sheaf::optim {

struct LearningRate {
  double peak = 1e-3;        ///< after warm-up
  double floor = 0.0;        ///< where decay ends, and after it
  int64_t warmup_steps = 0;  ///< from peak / (warmup + 1) upwards in equal steps
  int64_t total_steps = 0;   ///< where decay ends, warm-up included
};

/// Linear warm-up, then half a cosine from peak to floor (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983, without
/// restarts; warm-up as in nanoGPT).
double cosine_learning_rate(const LearningRate& lr, int64_t step);
/// Linear warm-up, then a straight line from peak to floor.
double linear_learning_rate(const LearningRate& lr, int64_t step);
/// Linear warm-up, then peak.
double constant_learning_rate(const LearningRate& lr, int64_t step);

}  // namespace sheaf::optim
