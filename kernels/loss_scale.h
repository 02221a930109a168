// The factor by which a loss is multiplied so that gradients in f16 do not underflow: it grows while nothing overflows and is reduced
// after an overflow.
#pragma once

#include <cstdint>

#include "sheaf/core/device.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// How the scale changes.
struct LossScaleRule {
  double growth, backoff;  ///< factors
  double minimum, maximum;
  int64_t growth_interval;  ///< steps without overflow after which it grows
};

/// The counts, in this order.
enum LossScaleCount : int {
  kGoodSteps,     ///< steps without overflow since the scale changed or a step was skipped
  kLostSteps,     ///< consecutive steps skipped although the scale was already at its minimum
  kSkippedSteps,  ///< all skipped steps
  kLossScaleCounts
};

/// One step of the rule, on one scale and its counts.
SHEAF_HOST_DEVICE inline void move_loss_scale(const LossScaleRule& rule, bool found_inf,
                                              float& scale, int64_t* counts) {
  const double now = scale, minimum = static_cast<float>(rule.minimum);  // which may be no f32 number
  if (found_inf) {
    const double less = now * rule.backoff;
    scale = static_cast<float>(less > minimum ? less : minimum);
    counts[kGoodSteps] = 0;
    counts[kLostSteps] = now > minimum ? 0 : counts[kLostSteps] + 1;
    ++counts[kSkippedSteps];
    return;
  }
  counts[kLostSteps] = 0;
  if (++counts[kGoodSteps] < rule.growth_interval) return;
  const double more = now * rule.growth;
  scale = static_cast<float>(more < rule.maximum ? more : rule.maximum);
  counts[kGoodSteps] = 0;
}

/// In place. found_inf: i32 []; scale: f32 []; counts: i64 [3].
namespace cpu {
void update_loss_scale(const View& found_inf, const LossScaleRule& rule, const View& scale,
                       const View& counts);
}
namespace cuda {
void update_loss_scale(const Stream& stream, const View& found_inf, const LossScaleRule& rule,
                       const View& scale, const View& counts);
}

/// Shared by both devices; throws ShapeError.
inline void check_loss_scale(const View& found_inf, const View& scale, const View& counts) {
  check<ShapeError>(found_inf.numel() == 1 && found_inf.dtype == kI32 && scale.numel() == 1 &&
                        scale.dtype == kF32 && counts.numel() == kLossScaleCounts &&
                        counts.dtype == kI64 && counts.contiguous(),
                    "[update_loss_scale] wants i32[], f32[] and i64[3], got ", found_inf.dtype,
                    found_inf.shape, ", ", scale.dtype, scale.shape, " and ", counts.dtype,
                    counts.shape);
}

}  // namespace sheaf::kernels
