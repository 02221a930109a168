// Every op of the table on a GPU, forward and backward, against f64 on the CPU.
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
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

struct Halve {  // as a user may write it who has only the CPU in mind
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

TEST(OpOnGpu, CudnnComputesAttentionWhereItTakesIt) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    context.device = context.gpu->device();
    RankScope scope(context);
    struct Case {
      DType dtype;
      int64_t batch, tokens, heads, groups, width;
      bool causal, takes;
    };
    const auto calls = [](const Case& c, bool packed) {
      const auto random = [&](const Shape& shape) {
        return cast(randn({kF32, shape, {}}, Key{1}), c.dtype);
      };
      const int64_t before = kernels::cuda::cudnn::attention_calls();
      Recording recording;
      Tensor out, x = random({c.batch, c.tokens, (c.heads + 2 * c.groups) * c.width});
      recording.watch(x);
      if (packed) {
        out = packed_attention(x, c.heads, c.groups, {.causal = c.causal});
      } else {
        const Tensor heads = reshape(x, {c.batch, c.tokens, c.heads + 2 * c.groups, c.width});
        const auto parts = split(heads, {c.heads, c.groups, c.groups}, 2);
        out = attention(parts[0], parts[1], parts[2], {.causal = c.causal});
      }
      const Tensor gradient = recording.gradient(sum(cast(out, kF32)), std::vector{x})[0];
      EXPECT_EQ(gradient.shape(), x.shape());
      return kernels::cuda::cudnn::attention_calls() - before;
    };
    if (!kernels::emulated_cuda() && calls({kBF16, 1, 128, 1, 1, 64, true, true}, true) == 0)
      GTEST_SKIP() << "not run: cuDNN takes nothing here";
    for (const Case& c : {Case{kBF16, 2, 128, 3, 3, 64, true, true}, Case{kF16, 1, 256, 4, 2, 128, true, true},
                          Case{kBF16, 1, 128, 25, 25, 8, true, true}, Case{kF32, 1, 128, 2, 2, 64, true, false},
                          Case{kBF16, 1, 129, 2, 2, 64, true, false}, Case{kBF16, 1, 128, 2, 2, 64, false, false}})
      for (bool packed : {true, false})
        EXPECT_EQ(calls(c, packed), c.takes ? 2 : 0)
            << name(c.dtype) << ' ' << c.tokens << ' ' << c.heads << (packed ? " packed" : "");
  }
}

TEST(OpOnGpu, AKernelForTheCpuAloneIsAnError) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    RankScope scope(context);
    const Tensor x = Tensor::from<float>({2, 4}, {2});
    EXPECT_EQ(apply<Halve>({}, x).to_vector(), (std::vector<float>{1, 2}));
    try {
      apply<Halve>({}, x.to(Device::cuda()));
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
