#include "sheaf/nn/optim/learning_rate.h"

#include <algorithm>
#include <cmath>

namespace sheaf::optim {
namespace {

// Of the warm-up, or negative after it.
double warming(const LearningRate& lr, int64_t step) {
  if (step >= lr.warmup_steps) return -1.0;
  return lr.peak * static_cast<double>(step + 1) / static_cast<double>(lr.warmup_steps + 1);
}

// How much of the decay is done, in [0, 1].
double decayed(const LearningRate& lr, int64_t step) {
  const int64_t length = lr.total_steps - lr.warmup_steps;
  if (length <= 0) return 1.0;
  return std::min(1.0, static_cast<double>(step - lr.warmup_steps) / static_cast<double>(length));
}

}  // namespace

double cosine_learning_rate(const LearningRate& lr, int64_t step) {
  if (const double w = warming(lr, step); w >= 0.0) return w;
  constexpr double kPi = 3.14159265358979323846;
  return lr.floor + 0.5 * (1.0 + std::cos(kPi * decayed(lr, step))) * (lr.peak - lr.floor);
}

double linear_learning_rate(const LearningRate& lr, int64_t step) {
  if (const double w = warming(lr, step); w >= 0.0) return w;
  return lr.peak + decayed(lr, step) * (lr.floor - lr.peak);
}

double constant_learning_rate(const LearningRate& lr, int64_t step) {
  const double w = warming(lr, step);
  return w >= 0.0 ? w : lr.peak;
}

}  // namespace sheaf::optim
