#include "sheaf/kernels/sum_of_squares.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// The same bits as the CPU's kernels on threads that flush subnormal numbers, as all threads of a
// rank do.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

View part(const View& x, int64_t first) {
  return View::dense(x.as<char>() + static_cast<size_t>(first) * size_of(x.dtype), x.dtype,
                     {x.numel() - first});
}
Array on_gpu(const Array& x, int64_t first = 0) {
  const OnGpu gx(x), limbs(Array(kI64, {cpu::kSquareLimbs}));
  const View from = part(gx.view(), first);
  cuda::sum_of_squares(OnGpu::stream(), from, limbs,
                       GpuScratch(cuda::sum_of_squares_workspace(without_data(from))));
  return limbs.back();
}
Array on_cpu(const Array& x, int64_t first = 0) {
  const Array limbs(kI64, {cpu::kSquareLimbs});
  with_threads(1, [&] {
    const View from = part(x.view(), first);
    cpu::sum_of_squares(from, limbs, Scratch(cpu::sum_of_squares_workspace(from)));
  });
  return limbs;
}
void expect_same_finish(const Array& limbs) {
  const Array want(kF64, Shape{});
  const OnGpu glimbs(limbs), out(want);
  cuda::sum_of_squares_finish(OnGpu::stream(), glimbs, out);
  cpu::sum_of_squares_finish(limbs, want);
  EXPECT_TRUE(same_bits(out.back(), want)) << out.back().at(0) << " on the CPU " << want.at(0);
  for (double most : {0.5, 1e30}) {
    const Array norm(kF64, Shape{}), scale(kF64, Shape{});
    const OnGpu gnorm(norm), gscale(scale);
    cuda::clip_scale(OnGpu::stream(), glimbs, most, gnorm, gscale);
    cpu::clip_scale(limbs, most, norm, scale);
    if (std::isnan(want.at(0))) {
      for (const Array& x : {norm, scale, gnorm.back(), gscale.back()})
        EXPECT_TRUE(std::isnan(x.at(0)));
      continue;
    }
    EXPECT_TRUE(same_bits(gnorm.back(), norm) && same_bits(gscale.back(), scale)) << most;
    EXPECT_EQ(norm.at(0), std::sqrt(want.at(0)));
    EXPECT_EQ(scale.at(0), std::min(most / (norm.at(0) + 1e-6), 1.0));
  }
  for (double loss : {1.0, 0x1p16, 3.7}) {
    const Array loss_scale = Array::of(kF32, {}, {loss}), norm(kF64, Shape{}), scale(kF64, Shape{}),
                found(kI32, Shape{});
    const OnGpu gloss(loss_scale), gnorm(norm), gscale(scale), gfound(found);
    cuda::clip_scale(OnGpu::stream(), glimbs, 0.5, gnorm, gscale, gloss, gfound);
    cpu::clip_scale(limbs, 0.5, norm, scale, loss_scale, found);
    EXPECT_TRUE(same_bits(gfound.back(), found));
    EXPECT_EQ(found.at(0), std::isfinite(want.at(0)) ? 0 : 1);
    if (std::isfinite(want.at(0))) {
      EXPECT_TRUE(same_bits(gnorm.back(), norm) && same_bits(gscale.back(), scale)) << loss;
    }
  }
}

TEST(CudaSumOfSquares, EveryLimbIsThatOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int64_t n : {0, 1, 15, 16, 31, 32, 33, 1000, 1023, 1024, 1025, 4096, 4100, 300007}) {
      const Array x = Array::random(d, {n}, 1);
      const Array limbs = on_gpu(x);
      EXPECT_TRUE(same_bits(limbs, on_cpu(x))) << name(d) << n;
      EXPECT_TRUE(same_bits(limbs, on_gpu(x))) << name(d) << n;
      expect_same_finish(limbs);
    }
}

TEST(CudaSumOfSquares, AnyMagnitudesAndAnyAlignment) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int range : {3, 20, 60, 290}) {
      // Adjacent blocks of different magnitudes, and elements of different magnitudes within a
      // block; also subnormal numbers, except in f64, which a CPU thread flushes.
      const int span = d == kF16 ? std::min(range, 28) : range, low = d == kF16 ? -20 : -149;
      Array x(d, {50000});
      std::mt19937 engine(static_cast<unsigned>(range));
      int64_t of_block = 0;
      x.fill([&](int64_t i) {
        if (i % 32 == 0) of_block = engine() % static_cast<unsigned>(span);
        const int exponent =
            static_cast<int>(of_block / (i % 7 + 1)) - (range > 200 ? 150 : span / 2);
        const double value = 1.0 + static_cast<double>(engine()) * 0x1p-32;
        return i % 1000 < 64 ? 0.0 : std::ldexp(value, std::clamp(exponent, low, 126));
      });
      for (int64_t first : {0, 1, 4, 7})
        EXPECT_TRUE(same_bits(on_gpu(x, first), on_cpu(x, first))) << name(d) << range << first;
      expect_same_finish(on_gpu(x));
    }
}

TEST(CudaSumOfSquares, AWarpMeetsOtherLimbsOnItsWay) {
  SHEAF_NEEDS_GPU();
  Array x = Array::random(kBF16, {1 << 20}, 1);
  for (int64_t i = 0; i < x.view().numel(); ++i)
    x.set(i, std::ldexp(x.at(i), static_cast<int>(i / 150000 * 17 % 60)));
  EXPECT_TRUE(same_bits(on_gpu(x), on_cpu(x)));
}

TEST(CudaSumOfSquares, WhatIsNotFiniteIsCounted) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF64}) {
    Array x = Array::random(d, {9000}, 1);
    expect_same_finish(on_gpu(x));
    x.set(40, INFINITY), x.set(8000, -INFINITY);
    EXPECT_TRUE(same_bits(on_gpu(x), on_cpu(x)));
    expect_same_finish(on_gpu(x));
    x.set(41, NAN), x.set(5000, NAN);
    EXPECT_TRUE(same_bits(on_gpu(x), on_cpu(x)));
    expect_same_finish(on_gpu(x));
  }
  const Array large = Array::of(kF64, {1}, {1e200}), tiny = Array::of(kF64, {1}, {0x1p-180});
  EXPECT_TRUE(same_bits(on_gpu(large), on_cpu(large)));
  EXPECT_TRUE(same_bits(on_gpu(tiny), on_cpu(tiny)));
}

TEST(CudaSumOfSquares, FinishRoundsOnceAndCorrectly) {
  SHEAF_NEEDS_GPU();
  std::vector<double> v(96, 0.0);
  v[0] = 0x1p30, v[32] = 0x1p3, v[33] = 0x1p3;  // halfway, to even
  expect_same_finish(on_gpu(Array::of(kF32, {96}, v)));
  v[64] = 0x1p-60;  // a little more
  expect_same_finish(on_gpu(Array::of(kF32, {96}, v)));
  std::mt19937_64 engine(1);
  for (int round = 0; round < 300; ++round) {
    Array limbs(kI64, {cpu::kSquareLimbs});
    int64_t* limb = limbs.view().as<int64_t>();
    std::fill_n(limb, cpu::kSquareLimbs, 0);
    const int first = round % 23, count = round / 23 % 5;
    for (int i = first; i < std::min(first + count, 23); ++i)
      limb[i] = static_cast<int64_t>(engine() >> (1 + engine() % 63));  // with carries
    if (round % 3 == 0 && first + 2 < 23) {  // halfway between doubles, odd and even, and close to halfway
      limb[first] = (1 << 11) + round / 3 % 3 - 1 + (round / 9 % 2 << 12);
      limb[first + 1] = 0, limb[first + 2] = 1;
    }
    if (round % 6 == 0 && first > 4) limb[first - 4] = round % 12 == 0;  // far below
    expect_same_finish(limbs);
  }
}

TEST(CudaSumOfSquares, RefusesOtherShapesAndTypes) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {10}), gaps(kF32, {2, 3}, {5, 1}), whole(kI32, {10}),
      limbs(kI64, {cpu::kSquareLimbs}), few(kI64, {23}), out(kF32, Shape{});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::sum_of_squares(s, gaps, limbs, {}), ShapeError);
  EXPECT_THROW(cuda::sum_of_squares(s, x, few, {}), ShapeError);
  EXPECT_THROW(cuda::sum_of_squares(s, whole, limbs, {}), DTypeError);
  EXPECT_THROW(cuda::sum_of_squares_finish(s, limbs, out), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
