// Every op of the table on a GPU, forward and backward, against f64 on the CPU.
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/tests/autograd/sample_suite.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

void check_on_gpu(const OpSample& sample) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    RankScope scope(context);
    const Device gpu = context.gpu->device();
    EXPECT_EQ(check_precision(sample, kF64, gpu), "");
    EXPECT_EQ(check_strides(sample, gpu), "");
    if (!sample.low_precision) return;
    EXPECT_EQ(check_precision(sample, kF32, gpu), "");
    EXPECT_EQ(check_precision(sample, kBF16, gpu), "");
    EXPECT_EQ(check_precision(sample, kF16, gpu), "");
    EXPECT_EQ(context.gpu->memory()->stats().live, 0);
  }
}

struct Halve {  // as a user may write it, who thinks of the CPU alone
  static constexpr const char* kName = "halve";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void execute(const Attrs&, Execute& c) {
    const View x = c.input(0);
    for (int64_t i = 0; i < x.numel(); ++i) c.output(0).as<float>()[i] = x.as<float>()[i] / 2;
  }
};

}  // namespace

TEST_P(Op, OnGpu) { check_on_gpu(GetParam()); }

TEST(OpOnGpu, AKernelForTheCpuAloneIsAnError) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    RankScope scope(context);
    const Tensor x = Tensor::from<float>({2, 4}, {2});
    EXPECT_EQ(apply<Halve>({}, {x}).to_vector(), (std::vector<float>{1, 2}));
    try {
      apply<Halve>({}, {x.to(Device::cuda())});
      FAIL() << "it read memory of the GPU";
    } catch (const ConfigError& e) {
      EXPECT_NE(std::string(e.what()).find("[halve] root: inputs on cuda:0, but its execute() has a kernel for the CPU"),
                std::string::npos)
          << e.what();
    }
  }
}

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
