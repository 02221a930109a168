#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

constexpr int64_t kIgnore = -100;

Array targets_of(DType d, const Shape& shape, int64_t vocabulary, Shape strides = {}) {
  Array t(d, shape, strides);
  t.fill([&](int64_t i) {
    return d != kU8 && i % 5 == 3 ? static_cast<double>(kIgnore)
                                  : static_cast<double>((i * 31 + 4) % vocabulary);
  });
  return t;
}

struct Results {
  Array losses, lse, dlogits;
};

Results on_gpu(const Array& logits, const Array& targets, const Array& scale, bool in_place) {
  const View& x = logits;
  const DType stat = statistics_of(x.dtype);
  const Stream& s = OnGpu::stream();
  const OnGpu gx(logits), gt(targets), gscale(scale), losses(Array(stat, targets.view().shape)),
      lse(Array(stat, targets.view().shape)), dlogits(Array(x.dtype, x.shape, x.strides));
  cuda::cross_entropy(s, gx, gt, kIgnore, losses, lse);
  cuda::cross_entropy_backward(s, gx, gt, kIgnore, lse, gscale, in_place ? gx : dlogits);
  return {losses.back(), lse.back(), (in_place ? gx : dlogits).back()};
}

Results on_cpu_in_f64(const Array& logits, const Array& targets, const Array& scale) {
  const Array x = in_f64(logits), wide_scale = in_f64(scale);
  const Shape& rows = targets.view().shape;
  const Results r{Array(kF64, rows), Array(kF64, rows), Array(kF64, x.view().shape)};
  cpu::cross_entropy(x, targets, kIgnore, r.losses, r.lse);
  cpu::cross_entropy_backward(x, targets, kIgnore, r.lse, wide_scale, r.dlogits);
  return r;
}

// One warp, one and several rounds of a block, rows that begin at any element.
constexpr int64_t kVocabularies[] = {1, 7, 31, 33, 64, 1000, 1001, 5000, 50257};

TEST(CudaCrossEntropy, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int64_t vocabulary : kVocabularies)
      for (bool per_row : {false, true}) {
        const Shape rows{2, vocabulary > 10000 ? 3 : 7}, shape{rows[0], rows[1], vocabulary};
        const DType stat = statistics_of(d);
        const Array logits = Array::random(d, shape, 1, 2),
                    targets = targets_of(per_row ? kI32 : kI64, rows, vocabulary),
                    scale =
                        per_row ? Array::random(stat, rows, 5) : Array::of(stat, Shape{}, {0.25});
        const Results got = on_gpu(logits, targets, scale, per_row),
                      want = on_cpu_in_f64(logits, targets, scale);
        const std::string where = std::string(name(d)) + std::to_string(vocabulary);
        const double statistic = d == kF64 ? 1e-14 : 2e-6;
        EXPECT_LT(scaled_error(got.lse, values(want.lse)), statistic) << where;
        if (vocabulary == 1) continue;  // losses and gradients are zero but for rounding
        EXPECT_LT(scaled_error(got.losses, values(want.losses)), statistic) << where;
        EXPECT_LT(scaled_error(got.dlogits, values(want.dlogits)), 4 * epsilon(d)) << where;
        for (int64_t r = 0; r < targets.view().numel(); ++r)
          if (targets.at(r) == kIgnore) {
            EXPECT_EQ(got.losses.at(r), 0.0);
            EXPECT_EQ(got.lse.at(r), 0.0);
            EXPECT_EQ(got.dlogits.at(r * vocabulary + vocabulary / 2), 0.0);
          }
      }
}

TEST(CudaCrossEntropy, StridesInPlaceAndOtherRowsChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t vocabulary : {40, 3001}) {
      const Shape shape{9, vocabulary};
      const Array logits = Array::random(d, shape, 1, 2), scale = Array::random(kF32, {9}, 3),
                  targets = targets_of(kU8, {9}, 40);
      const Results want = on_gpu(logits, targets, scale, false);
      for (int64_t gap : {0, 1, 2, 3, 5, 8})
        for (bool in_place : {false, true}) {
          const Array strided = Array::random(d, shape, 1, 2, {vocabulary + gap, 1}),
                      spread = targets_of(kI64, {9}, 40, {3});
          const Array same = targets_of(kU8, {9}, 40);
          const Results got = on_gpu(strided, same, scale, in_place);
          EXPECT_TRUE(same_bits(got.losses, want.losses) && same_bits(got.lse, want.lse) &&
                      same_bits(got.dlogits, want.dlogits))
              << name(d) << vocabulary << ' ' << gap;
          EXPECT_TRUE(gaps_kept(Array(d, shape, {vocabulary + gap, 1}), got.dlogits));
          // The same targets in other memory, where rows 3 and 8 are to be ignored.
          const Results some = on_gpu(strided, spread, scale, in_place);
          for (int64_t r = 0; r < 9; ++r)
            EXPECT_EQ(some.losses.at(r), r % 5 == 3 ? 0.0 : want.losses.at(r));
        }
    }
}

TEST(CudaCrossEntropy, BadTargetsGiveNaN) {
  SHEAF_NEEDS_GPU();
  const Array logits = Array::random(kF32, {4, 37}, 1), scale = Array::of(kF32, Shape{}, {1}),
              targets = Array::of(kI64, {4}, {0, 37, -1, 36});
  const Results got = on_gpu(logits, targets, scale, false);
  for (int64_t r = 0; r < 4; ++r) {
    const bool bad = r == 1 || r == 2;
    EXPECT_EQ(std::isnan(got.losses.at(r)), bad);
    EXPECT_FALSE(std::isnan(got.lse.at(r)));
    for (int64_t i = 0; i < 37; ++i) EXPECT_EQ(std::isnan(got.dlogits.at(r * 37 + i)), bad);
  }
}

TEST(CudaCrossEntropy, LargeAndInfiniteLogits) {
  SHEAF_NEEDS_GPU();
  const int64_t n = 3000;
  Array logits = Array::random(kF32, {4, n}, 1, 1000);
  for (int64_t i = 0; i < n; ++i) {
    logits.set(n + i, i == 2900 ? 3.0 : -INFINITY);  // all weight on one
    if (i < 2800) logits.set(2 * n + i, -INFINITY);  // threads that see nothing else
    if (i == 77) logits.set(3 * n + i, std::nan(""));
  }
  const Array targets = Array::of(kI64, {4}, {5, 2900, 2950, 0}),
              scale = Array::of(kF32, Shape{}, {1});
  const Results got = on_gpu(logits, targets, scale, false),
                want = on_cpu_in_f64(logits, targets, scale);
  EXPECT_NEAR(got.losses.at(0), want.losses.at(0), 1e-6 * std::fabs(want.losses.at(0)));
  EXPECT_EQ(got.losses.at(1), 0.0);
  EXPECT_NEAR(got.lse.at(2), want.lse.at(2), 1e-6 * std::fabs(want.lse.at(2)));
  EXPECT_TRUE(std::isnan(got.losses.at(3)));
  for (int64_t i = 0; i < 3 * n; ++i)
    EXPECT_NEAR(got.dlogits.at(i), want.dlogits.at(i), 2e-4);  // an lse of 3,000 has only this many digits
}

TEST(CudaCrossEntropy, NoRowsAndTwiceTheSame) {
  SHEAF_NEEDS_GPU();
  on_gpu(Array(kF32, {0, 5}), Array(kI64, {0}), Array::of(kF32, Shape{}, {1}), false);
  const Array logits = Array::random(kBF16, {20, 9000}, 1, 3),
              targets = targets_of(kI64, {20}, 9000), scale = Array::of(kF32, Shape{}, {1});
  const Results one = on_gpu(logits, targets, scale, false),
                two = on_gpu(logits, targets, scale, true);
  EXPECT_TRUE(same_bits(one.losses, two.losses) && same_bits(one.lse, two.lse) &&
              same_bits(one.dlogits, two.dlogits));
}

TEST(CudaCrossEntropy, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  const Array logits(kF32, {2, 5}), targets(kI64, {3}), row(kF32, {3}), narrow(kBF16, {2});
  EXPECT_THROW(cuda::cross_entropy(OnGpu::stream(), logits, targets, kIgnore, row, row),
               ShapeError);
  EXPECT_THROW(
      cuda::cross_entropy(OnGpu::stream(), logits, Array(kI64, {2}), kIgnore, narrow, narrow),
      DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
