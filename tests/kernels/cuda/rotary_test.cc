#include "sheaf/kernels/rotary.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernel in f64, which has its own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Call {
  double theta = 10000;
  int64_t first = 0, heads = 1 << 20, width = -1;  ///< -1: D
  bool neighbours = false, inverse = false, in_place = false;
  RotaryScaling scaling = {};
  RotaryPart part_of(const View& x) const { return {heads, width == -1 ? x.shape[3] : width, neighbours}; }
};

Array on_gpu(const Array& x, const Call& c, Shape strides = {}) {
  const OnGpu gx(x), gy(Array(x.view().dtype, x.view().shape, strides));
  const RotaryPart part = c.part_of(gx);
  cuda::rotary(OnGpu::stream(), gx, c.theta, c.scaling, c.first, part, c.inverse,
               c.in_place ? gx : gy, GpuScratch(cuda::rotary_workspace(without_data(gx), part)));
  return (c.in_place ? gx : gy).back();
}
Array on_cpu_in_f64(const Array& x, const Call& c) {
  const Array wide = in_f64(x), y(kF64, x.view().shape);
  const RotaryPart part = c.part_of(wide);
  cpu::rotary(wide, c.theta, c.scaling, c.first, part, c.inverse, y,
              Scratch(cpu::rotary_workspace(wide, part)));
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

// Parts that begin at 16 bytes and not, halves of whole packs and not; nothing, all but one element and all of a head.
TEST(CudaRotary, PartsMatchTheCpuAndTheRestIsCopied) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16, kF16, kF64})
    for (const auto& [width, rotated] : {std::pair{192, 64}, {24, 16}, {40, 20}, {7, 6}, {9, 2}, {30, 30}, {5, 0}})
      for (const bool neighbours : {false, true})
        for (const int64_t heads : {0, 2, 3})
          for (const bool in_place : {false, true})
            for (const bool inverse : {false, true}) {
              const Array x = Array::random(d, {2, 37, 3, width}, 1);
              const Call call{.first = 61,
                              .heads = heads,
                              .width = rotated,
                              .neighbours = neighbours,
                              .inverse = inverse,
                              .in_place = in_place,
                              .scaling = inverse ? RotaryScaling() : RotaryScaling::yarn(8, 100)};
              const Array got = on_gpu(x, call);
              const std::string where = str(d, ' ', rotated, " of ", width, neighbours ? " neighbours" : "", ", heads ", heads);
              EXPECT_LT(scaled_error(got, values(on_cpu_in_f64(x, call))), d == kF64 ? 1e-12 : 2 * epsilon(d)) << where;
              int64_t touched = 0;
              for (int64_t i = 0; i < x.view().numel(); ++i)
                touched += (i / width % 3 >= heads || i % width < width - rotated) && got.at(i) != x.at(i);
              EXPECT_EQ(touched, 0) << where;
            }
}

// Of heads of up to 256 elements, for contexts up to the original one and beyond.
TEST(CudaRotary, PairsHaveFactorsOfTheirOwn) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16, kF64})
    for (const int64_t width : {2, 6, 96, 256})
      for (const bool neighbours : {false, true})
        for (const int64_t context : {100, 101}) {
          std::vector<double> short_factors(static_cast<size_t>(width / 2)), long_factors(short_factors.size());
          for (size_t i = 0; i < short_factors.size(); ++i)
            short_factors[i] = 1 + 0.01 * static_cast<double>(i), long_factors[i] = 1.02 + 0.5 * static_cast<double>(i);
          const Array x = Array::random(d, {2, 37, 3, width}, 1);
          const Call call{.first = 61, .heads = 2, .neighbours = neighbours, .inverse = width == 6,
                          .scaling = RotaryScaling::longrope(short_factors, long_factors, 8, 100).for_context(context)};
          EXPECT_LT(scaled_error(on_gpu(x, call), values(on_cpu_in_f64(x, call))), d == kF64 ? 1e-12 : 2 * epsilon(d)) << name(d) << width;
        }
}

TEST(CudaRotary, APartHasTheBitsThatItHasAlone) {
  SHEAF_NEEDS_GPU();
  for (const bool neighbours : {false, true}) {
    const Shape strides{70 * 400, 400, 33, 1};  // rows aligned to 16 bytes, and not
    const Array x = Array::random(kBF16, {2, 70, 4, 24}, 1), strided = Array::random(kBF16, {2, 70, 4, 24}, 1, 1, strides);
    const Call call{.first = 3, .heads = 3, .width = 16, .neighbours = neighbours};
    const Array got = on_gpu(x, call), in_gaps = on_gpu(strided, call, strides);
    EXPECT_TRUE(same_bits(in_gaps, got) && gaps_kept(Array(kBF16, {2, 70, 4, 24}, strides), in_gaps));
    const auto part_of = [](View v) {
      v.data = v.as<char>() + 8 * size_of(v.dtype), v.shape[3] = 16;
      return v;
    };
    const Array part = Array::of(kBF16, {2, 70, 4, 16}, values(part_of(x)));
    EXPECT_TRUE(same_bits(part_of(got), on_gpu(part, {.first = 3, .heads = 3, .neighbours = neighbours})));
    Call in_place = call;
    in_place.in_place = true;
    EXPECT_TRUE(same_bits(on_gpu(strided, in_place), got));
    EXPECT_TRUE(gaps_kept(strided, on_gpu(strided, in_place)));
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
    // Position 50 + 3 alone, as in generation.
    Array step(d, {2, 1, 4, 32});
    for (int64_t i = 0; i < 256; ++i) step.set(i, x.at((i / 128 * 70 + 50) * 128 + i % 128));
    const Array alone = on_gpu(step, {.first = 53});
    for (int64_t i = 0; i < 256; ++i)
      EXPECT_EQ(alone.at(i), want.at((i / 128 * 70 + 50) * 128 + i % 128));
  }
  on_gpu(Array(kF32, {1, 0, 2, 4}), {});
}

// More sequences than blocks, so that one block computes tables for several.
TEST(CudaRotary, RowsThatBeginAnywhereHaveTheirPositions) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16})
    for (const Shape& s : {Shape{2, 70, 3, 24}, Shape{2100, 1, 1, 8}}) {
      const Array x = Array::random(d, s, 1), wide = in_f64(x), want(kF64, s);
      Array begins(kI32, {s[0], s[1]});
      begins.fill([](int64_t i) { return static_cast<double>(i * 7 % 50); });
      const RotaryPart part{2, s[3]};
      cpu::rotary(wide, 10000, {}, {61, begins}, part, false, want, Scratch(cpu::rotary_workspace(wide, part, {61, begins})));
      const OnGpu gx(x), gb(begins), gy(Array(d, s));
      cuda::rotary(OnGpu::stream(), gx, 10000, {}, {61, gb}, part, false, gy, GpuScratch(cuda::rotary_workspace(without_data(gx), part)));
      EXPECT_LT(scaled_error(gy.back(), values(want)), 2 * epsilon(d)) << name(d) << s.to_string();
    }
}

TEST(CudaRotary, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  EXPECT_THROW(on_gpu(Array(kF32, {1, 2, 1, 3}), {}), ShapeError);
  for (const int64_t width : {-2, 3, 6})
    EXPECT_THROW(on_gpu(Array(kF32, {1, 2, 1, 4}), {.width = width}), ShapeError) << width;
  EXPECT_THROW(on_gpu(Array(kF32, {1, 2, 1, 4}), {.first = -1}), ConfigError);
}

}  // namespace
}  // namespace sheaf::kernels
