#include "sheaf/kernels/attention_sinks.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Operands {
  Array sinks, out, lse, dout;
};

Operands random(DType d, const Shape& shape, const Shape& strides = {}, const Shape& of_lse = {}) {
  const DType exact = statistics_of(d);
  return {Array::random(exact, {shape[2]}, 1), Array::random(d, shape, 2, 1, strides),
          Array::random(exact, {shape[0], shape[2], shape[1]}, 3, 1, of_lse), Array::random(d, shape, 4, 1, strides)};
}

void check(const Operands& o) {
  const DType d = o.out.view().dtype;
  const Stream& s = OnGpu::stream();
  const std::string what = str(d, o.out.view().shape, o.out.view().strides);
  const Array out = in_f64(o.out), lse = in_f64(o.lse), sinks = in_f64(o.sinks), scores(kF64, lse.view().shape);
  cpu::attention_sinks(sinks, out, lse);
  const OnGpu of_gpu(o.out), lse_of_gpu(o.lse), sinks_of_gpu(o.sinks);
  cuda::attention_sinks(s, sinks_of_gpu, of_gpu, lse_of_gpu);
  const double error = d == kF64 ? 1e-14 : d == kF32 ? 2e-6 : epsilon(d);
  const Array got = of_gpu.back(), got_lse = lse_of_gpu.back();
  EXPECT_LT(scaled_error(got, values(out)), error) << what;
  EXPECT_LT(scaled_error(got_lse, values(lse)), d == kF64 ? 1e-14 : 1e-6) << what;

  cpu::attention_sinks_backward(sinks, in_f64(got), in_f64(got_lse), in_f64(o.dout), scores);
  const OnGpu dout(o.dout), scores_of_gpu(Array(statistics_of(d), lse.view().shape, o.lse.view().strides));
  cuda::attention_sinks_backward(s, sinks_of_gpu, of_gpu, lse_of_gpu, dout, scores_of_gpu);
  EXPECT_LT(scaled_error(scores_of_gpu.back(), values(scores)), d == kF64 ? 1e-14 : 2e-6) << what;
}

// Rows of less than a pack and of more than a warp's.
TEST(CudaAttentionSinks, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (int64_t width : {1, 7, 64, 128, 300, 1031}) check(random(d, {2, 5, 3, width}));
}

TEST(CudaAttentionSinks, ManyRows) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) check(random(d, {3, 67, 10, 64}));
}

TEST(CudaAttentionSinks, TakesAnyStrides) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16}) check(random(d, {2, 3, 5, 19}, {700, 230, 40, 1}, {1, 14, 2}));
}

TEST(CudaAttentionSinks, ExtremeScores) {
  SHEAF_NEEDS_GPU();
  const Array sinks = Array::of(kF32, {5}, {1.5, -INFINITY, -INFINITY, 300, -300});
  const Array out = Array::of(kF32, {1, 1, 5, 1}, {0, 2, 0, 2, 2}), lse = Array::of(kF32, {1, 5, 1}, {-INFINITY, 0.5, -INFINITY, -300, 300});
  const OnGpu s(sinks), o(out), l(lse), d(lse.clone());
  cuda::attention_sinks(OnGpu::stream(), s, o, l);
  cuda::attention_sinks_backward(OnGpu::stream(), s, o, l, o, d);
  EXPECT_EQ(values(l.back()), (std::vector<double>{1.5, 0.5, -INFINITY, 300, 300}));
  EXPECT_EQ(values(o.back()), (std::vector<double>{0, 2, 0, 0, 2}));
  EXPECT_EQ(values(d.back()), (std::vector<double>{0, 0, 0, 0, 0}));
}

TEST(CudaAttentionSinks, TakesNothing) {
  SHEAF_NEEDS_GPU();
  const OnGpu out(Array(kF32, {0, 3, 4, 8})), lse(Array(kF32, {0, 4, 3})), sinks(Array(kF32, {4}));
  cuda::attention_sinks(OnGpu::stream(), sinks, out, lse);
  cuda::attention_sinks_backward(OnGpu::stream(), sinks, out, lse, out, lse);
}

}  // namespace
}  // namespace sheaf::kernels
