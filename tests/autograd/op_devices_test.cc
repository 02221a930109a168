// Every op of the table on a GPU, forward and backward, against f64 on the CPU.
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {
namespace {

void check_on_gpu(const OpSample& sample) {
  if constexpr (kernels::kHasCuda) {
    if (kernels::cuda::device_count() == 0)
      GTEST_SKIP() << "not run: no GPU here (" << kernels::cuda::why_no_device() << ")";
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    RankScope scope(context);
    const Device gpu = context.gpu->device();
    EXPECT_EQ(check_precision(sample, kF64, gpu), "");
    EXPECT_EQ(check_strides(sample, gpu), "");
    if (!sample.low_precision) return;
    EXPECT_EQ(check_precision(sample, kF32, gpu), "");
    EXPECT_EQ(check_precision(sample, kBF16, gpu), "");
    EXPECT_EQ(context.gpu->memory()->stats().live, 0);
  } else {
    GTEST_SKIP() << "not run: built without CUDA";
  }
}

}  // namespace

TEST_P(Op, OnGpu) { check_on_gpu(GetParam()); }

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
