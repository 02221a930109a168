#include "sheaf/nn/optim/schedule.h"

#include <algorithm>
#include <cmath>

namespace sheaf::optim {
namespace {

// The rate during warm-up; negative after it.
double warming(int64_t step, const ScheduleOptions& o) {
  if (step >= o.warmup) return -1.0;
  return o.peak * static_cast<double>(step + 1) / static_cast<double>(o.warmup + 1);
}

// The fraction of the decay that is done, in [0, 1].
double decayed(int64_t step, const ScheduleOptions& o) {
  const int64_t start = std::max(o.warmup, o.decay_start), length = o.total - start;
  if (length <= 0) return step < start ? 0.0 : 1.0;
  return std::clamp(static_cast<double>(step - start) / static_cast<double>(length), 0.0, 1.0);
}

}  // namespace

double cosine(int64_t step, const ScheduleOptions& o) {
  if (const double w = warming(step, o); w >= 0.0) return w;
  constexpr double kPi = 3.14159265358979323846;
  return o.minimum + 0.5 * (1.0 + std::cos(kPi * decayed(step, o))) * (o.peak - o.minimum);
}

double linear(int64_t step, const ScheduleOptions& o) {
  if (const double w = warming(step, o); w >= 0.0) return w;
  return o.peak + decayed(step, o) * (o.minimum - o.peak);
}

double constant(int64_t step, const ScheduleOptions& o) {
  const double w = warming(step, o);
  return w >= 0.0 ? w : o.peak;
}

}  // namespace sheaf::optim
