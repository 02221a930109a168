#include "sheaf/kernels/cuda/launch.h"
#include "sheaf/kernels/loss_scale.h"

namespace sheaf::kernels::cuda {
namespace {

__global__ void move(const int32_t* found_inf, LossScaleRule rule, float* scale, int64_t* counts) {
  if (threadIdx.x == 0) move_loss_scale(rule, *found_inf != 0, *scale, counts);
}

}  // namespace

void update_loss_scale(const Stream& stream, const View& found_inf, const LossScaleRule& rule,
                       const View& scale, const View& counts) {
  check_loss_scale(found_inf, scale, counts);
  launch("update_loss_scale", stream, {.blocks = 1, .threads = kWarp}, move,
         found_inf.as<int32_t>(), rule, scale.as<float>(), counts.as<int64_t>());
}

}  // namespace sheaf::kernels::cuda
