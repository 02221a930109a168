#include "sheaf/kernels/sum_of_squares.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array limbs_of(const View& x) {
  Array limbs(kI64, {kSquareLimbs});
  sum_of_squares(x, limbs, Scratch(sum_of_squares_workspace(without_data(x))));
  return limbs;
}
double finish(const View& limbs) {
  Array out(kF64, Shape{});
  sum_of_squares_finish(limbs, out);
  return out.at(0);
}
View part(const View& x, int64_t first, int64_t count) {
  return View::dense(x.as<char>() + static_cast<size_t>(first) * size_of(x.dtype), x.dtype,
                     {count});
}

TEST(SumOfSquares, MatchesAPlainSum) {
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int64_t n : {0, 1, 31, 32, 33, 5000}) {
      const Array x = Array::random(d, {n}, 1);
      long double want = 0;
      for (int64_t i = 0; i < n; ++i) want += static_cast<long double>(x.at(i)) * x.at(i);
      EXPECT_NEAR(finish(limbs_of(x)), static_cast<double>(want), 1e-14 * static_cast<double>(want))
          << name(d) << n;
    }
}

TEST(SumOfSquares, AnyCutAndAnyOrderGiveTheSameBits) {
  Array x(kF32, {100000});
  // Magnitudes over 60 binades, where rounding would show.
  x.fill([](int64_t i) {
    return std::ldexp(1.0 + static_cast<double>(i * 7919 % 10007) / 10007,
                      static_cast<int>(i * 31 % 60) - 30);
  });
  Array whole;
  with_threads(1, [&] { whole = limbs_of(x); });
  with_threads(2, [&] { EXPECT_EQ(finish(limbs_of(x)), finish(whole)); });
  std::mt19937 engine(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> cuts{0, 100000};
    for (int i = 0; i < round; ++i) cuts.push_back(static_cast<int64_t>(engine() % 3125) * 32);
    std::sort(cuts.begin(), cuts.end());
    std::vector<Array> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      parts.push_back(limbs_of(part(x, cuts[i], cuts[i + 1] - cuts[i])));
    std::shuffle(parts.begin(), parts.end(), engine);
    Array sum(kI64, {kSquareLimbs});
    for (int64_t i = 0; i < kSquareLimbs; ++i) {
      int64_t total = 0;
      for (const Array& p : parts) total += p.view().as<int64_t>()[i];
      sum.view().as<int64_t>()[i] = total;
    }
    EXPECT_EQ(finish(sum), finish(whole));
  }
}

TEST(SumOfSquares, RoundsOnceAndCorrectly) {
  // 2^60 + 2^7 is halfway between 2^60 and the next double, 2^60 + 2^8; to even is down. Anything
  // larger rounds up.
  std::vector<double> v(96, 0.0);
  v[0] = 0x1p30, v[32] = 0x1p3, v[33] = 0x1p3;
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {96}, v))), 0x1p60);
  v[64] = 0x1p-60;
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {96}, v))), 0x1p60 + 0x1p8);
}

TEST(SumOfSquares, ExtremesOfF32) {
  const double largest = 0x1.fffffep127, smallest = 0x1p-126;
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {1}, {largest}))), largest * largest);
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {1}, {smallest}))), smallest * smallest);
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {64}, std::vector<double>(64, largest)))),
            64 * largest * largest);
}

// However many elements each of them is of.
TEST(SumOfSquares, ManySumsDoNotOverflow) {
  for (const int64_t n : {32, 1 << 20}) {
    Array limbs = limbs_of(Array::of(kF32, {n}, std::vector<double>(static_cast<size_t>(n), 1.999)));
    const double one = finish(limbs);
    for (int64_t i = 0; i < kSquareLimbs; ++i) {
      int64_t& limb = limbs.view().as<int64_t>()[i];
      EXPECT_LT(limb, int64_t{1} << 32) << "limb " << i;
      limb <<= 30;
    }
    EXPECT_EQ(finish(limbs), std::ldexp(one, 30));
  }
}

TEST(SumOfSquares, NonFiniteIsSeen) {
  EXPECT_EQ(finish(limbs_of(Array::of(kF32, {40}, std::vector<double>(40, INFINITY)))), INFINITY);
  std::vector<double> v(40, 1.0);
  v[35] = NAN, v[3] = INFINITY;
  EXPECT_TRUE(std::isnan(finish(limbs_of(Array::of(kF32, {40}, v)))));
  EXPECT_EQ(finish(limbs_of(Array::of(kF64, {1}, {1e200}))), INFINITY);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
