// Learning-rate schedules: plain functions of the step, which counts from 0.
#pragma once

#include <cstdint>

namespace sheaf::optim {

struct ScheduleOptions {
  double peak = 1e-3;       ///< learning rate after warm-up
  double minimum = 0.0;     ///< where decay ends, and after it
  int64_t warmup = 0;       ///< steps, rising from peak / (warmup + 1) in equal parts
  int64_t decay_start = 0;  ///< step at which decay starts, if it is after the warm-up: until then the rate is peak
  int64_t total = 0;        ///< step at which decay ends, warm-up included; nanoGPT's lr_decay_iters. 0: the rate is `minimum` after the warm-up
};

/// Linear warm-up, then half a cosine from peak to minimum (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983,
/// without restarts; warm-up as in nanoGPT).
double cosine(int64_t step, const ScheduleOptions& options);
/// Linear warm-up, then a straight line from peak to minimum. With decay_start it is a trapezoid (WSD: warm-up, stable,
/// decay), the linear cooldown of Hägele et al., https://arxiv.org/abs/2405.18392.
double linear(int64_t step, const ScheduleOptions& options);
/// Linear warm-up, then peak.
double constant(int64_t step, const ScheduleOptions& options);

}  // namespace sheaf::optim
