#include "sheaf/kernels/rotary.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernel in f64, which has tests of its own.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Call {
  double theta = 10000;
  int64_t first = 0, heads = 1 << 20;
  bool inverse = false, in_place = false;
  RotaryScaling scaling = {};
};

Array on_gpu(const Array& x, const Call& c, Shape strides = {}) {
  const OnGpu gx(x), gy(Array(x.view().dtype, x.view().shape, strides));
  cuda::rotary(OnGpu::stream(), gx, c.theta, c.scaling, c.first, c.heads, c.inverse,
               c.in_place ? gx : gy, GpuScratch(cuda::rotary_workspace(without_data(gx))));
  return (c.in_place ? gx : gy).back();
}
Array on_cpu_in_f64(const Array& x, const Call& c) {
  const Array wide = in_f64(x), y(kF64, x.view().shape);
  cpu::rotary(wide, c.theta, c.scaling, c.first, c.heads, c.inverse, y,
              Scratch(cpu::rotary_workspace(wide)));
  return y;
}

TEST(CudaRotary, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Shape& s :
         {Shape{2, 5, 3, 8}, Shape{1, 200, 2, 64}, Shape{1, 3, 1, 2}, Shape{2, 33, 1, 40},
          Shape{3, 31, 2, 6}, Shape{1, 2, 1, 1030}, Shape{2100, 1, 1, 2}, Shape{1, 1, 33, 128}})
      for (int64_t first : {int64_t{0}, int64_t{61}, int64_t{1000000}})
        for (bool inverse : {false, true}) {
          const Array x = Array::random(d, s, 1);
          const Call call{
              .theta = first == 61 ? 500000.0 : 10000.0,
              .first = first,
              .inverse = inverse,
              .in_place = first == 61,
              .scaling = inverse == (first == 0) ? RotaryScaling::llama3(8)
                         : first == 61          ? RotaryScaling::yarn(8, 100)
                                                : RotaryScaling()};
          // A million times the rounding error of a frequency.
          EXPECT_LT(scaled_error(on_gpu(x, call), values(on_cpu_in_f64(x, call))),
                    d == kF64 ? 1e-9 : 2 * epsilon(d))
              << name(d) << s.to_string() << first;
        }
}

TEST(CudaRotary, OtherHeadsAreCopied) {
  SHEAF_NEEDS_GPU();
  for (bool in_place : {false, true}) {
    const Array x = Array::random(kBF16, {2, 9, 5, 24}, 1);
    const Array some = on_gpu(x, {.heads = 3, .in_place = in_place}), all = on_gpu(x, {});
    for (int64_t i = 0; i < x.view().numel(); ++i)
      EXPECT_EQ(some.at(i), i / 24 % 5 >= 3 ? x.at(i) : all.at(i));
  }
}

TEST(CudaRotary, StridesAndOffsetsChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF16}) {
    const Shape s{2, 70, 4, 32};
    const Array x = Array::random(d, s, 1), want = on_gpu(x, {.first = 3});
    EXPECT_TRUE(same_bits(on_gpu(x, {.first = 3}), want));
    const Shape strides{70 * 400, 400, 33, 1};
    const Array strided = Array::random(d, s, 1, 1, strides);
    const Array y = on_gpu(strided, {.first = 3}, strides);
    EXPECT_TRUE(same_bits(y, want) && gaps_kept(Array(d, s, strides), y));
    // Position 50 + 3 alone, as generation asks for it.
    Array step(d, {2, 1, 4, 32});
    for (int64_t i = 0; i < 256; ++i) step.set(i, x.at((i / 128 * 70 + 50) * 128 + i % 128));
    const Array alone = on_gpu(step, {.first = 53});
    for (int64_t i = 0; i < 256; ++i)
      EXPECT_EQ(alone.at(i), want.at((i / 128 * 70 + 50) * 128 + i % 128));
  }
  on_gpu(Array(kF32, {1, 0, 2, 4}), {});
}

TEST(CudaRotary, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  EXPECT_THROW(on_gpu(Array(kF32, {1, 2, 1, 3}), {}), ShapeError);
  EXPECT_THROW(on_gpu(Array(kF32, {1, 2, 1, 4}), {.first = -1}), ConfigError);
}

}  // namespace
}  // namespace sheaf::kernels
