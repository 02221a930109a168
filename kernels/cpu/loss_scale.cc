#include "sheaf/kernels/loss_scale.h"

namespace sheaf::kernels::cpu {

void update_loss_scale(const View& found_inf, const LossScaleRule& rule, const View& scale,
                       const View& counts) {
  check_loss_scale(found_inf, scale, counts);
  move_loss_scale(rule, *found_inf.as<int32_t>() != 0, *scale.as<float>(), counts.as<int64_t>());
}

}  // namespace sheaf::kernels::cpu
