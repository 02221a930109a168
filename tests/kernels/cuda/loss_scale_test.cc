#include "sheaf/kernels/loss_scale.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

TEST(CudaLossScale, MovesAsOnTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const LossScaleRule& rule :
       {LossScaleRule{2, 0.5, 1, 0x1p64, 3}, LossScaleRule{1.7, 0.3, 2, 300, 2}}) {
    const Array scale = Array::of(kF32, {}, {16}), counts = Array::of(kI64, {3}, {0, 0, 0});
    const OnGpu gscale(scale), gcounts(counts);
    std::mt19937 engine(1);
    for (int step = 0; step < 200; ++step) {
      const bool often = step / 50 % 2;
      const Array found = Array::of(kI32, {}, {engine() % (often ? 2 : 9) == 0 ? 1.0 : 0.0});
      cpu::update_loss_scale(found, rule, scale, counts);
      cuda::update_loss_scale(OnGpu::stream(), OnGpu(found), rule, gscale, gcounts);
      ASSERT_TRUE(same_bits(gscale.back(), scale)) << step;
      ASSERT_TRUE(same_bits(gcounts.back(), counts)) << step;
    }
  }
}

}  // namespace
}  // namespace sheaf::kernels
