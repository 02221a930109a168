#include "sheaf/kernels/optimizer.h"

#include <bit>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

constexpr int64_t kSize = 1000;
/// Padding at 300..320 and from 990.
const std::vector<double> kLr = {1, 0.25, 3}, kDecay = {1, 0, 0.5};
Array segments() {
  return Array::of(kF64, {3, 4}, {0, 300, kLr[0], kDecay[0], 320, 777, kLr[1], kDecay[1], 777, 990, kLr[2], kDecay[2]});
}
int segment_of(int64_t i) { return i < 300 ? 0 : i < 320 ? -1 : i < 777 ? 1 : i < 990 ? 2 : -1; }

View part_of(const View& x, int64_t first, int64_t count) {
  return View::dense(x.as<char>() + static_cast<size_t>(first) * size_of(x.dtype), x.dtype, {count});
}

TEST(AdamW, MatchesTheDefinition) {
  for (DType d : {kF32, kF64})
    for (DType grad_dtype : {kF32, kBF16, kF64}) {
      Array p = Array::random(d, {kSize}, 1), g = Array::random(grad_dtype, {kSize}, 2),
            m = Array::random(d, {kSize}, 3, 0.1), v = Array::random(d, {kSize}, 4, 0.1);
      v.fill([&](int64_t i) { return std::fabs(v.at(i)); });
      const double lr = 0.01, b1 = 0.9, b2 = 0.95, eps = 1e-8, wd = 0.1, c1 = 0.19, c2 = 0.0975,
                   clip = 0.7;
      auto wp = values(p), wm = values(m), wv = values(v);
      for (int64_t i = 0; i < kSize; ++i) {
        if (segment_of(i) < 0) continue;
        const double grad = clip * g.at(i);
        wm[i] = b1 * wm[i] + (1 - b1) * grad, wv[i] = b2 * wv[i] + (1 - b2) * grad * grad;
        const size_t s = static_cast<size_t>(segment_of(i));
        wp[i] -= lr * kLr[s] * wd * kDecay[s] * wp[i];
        wp[i] -= lr * kLr[s] * (wm[i] / c1) / (std::sqrt(wv[i] / c2) + eps);
      }
      adamw(p, g, m, v, segments(),
            Array::of(kF64, {kAdamWScalars}, {lr, b1, b2, eps, wd, c1, c2, clip, 1}));
      EXPECT_LT(scaled_error(p, wp), 2 * epsilon(d)) << name(d) << name(grad_dtype);
      EXPECT_LT(scaled_error(m, wm), 2 * epsilon(d)) << name(d) << name(grad_dtype);
      EXPECT_LT(scaled_error(v, wv), 4 * epsilon(d)) << name(d) << name(grad_dtype);
    }
}

TEST(AdamW, NothingIsDoneWhereInfinityWasFound) {
  for (int found : {0, 1}) {
    Array p = Array::random(kF32, {kSize}, 1), m = Array::random(kF32, {kSize}, 3), v = m.clone();
    v.fill([&](int64_t i) { return std::fabs(v.at(i)); });
    const Array before[] = {p.clone(), m.clone(), v.clone()};
    const Array g = Array::random(kF32, {kSize}, 2), nan = Array::of(kF64, {}, {NAN}),
                flag = Array::of(kI32, {}, {double(found)});
    adamw(p, g, m, v, segments(),
          Array::of(kF64, {kAdamWScalars}, {0.01, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975, 1, 1}),
          found ? nan.view() : View{}, flag);
    EXPECT_EQ(same_bits(p, before[0]), found == 1);
    EXPECT_EQ(same_bits(m, before[1]), found == 1);
    EXPECT_EQ(same_bits(v, before[2]), found == 1);
    const Array b = m.clone();
    sgd(p, p, m, segments(), Array::of(kF64, {kSgdScalars}, {0.1, 0.9, 0.1, 1, 1}), true, {}, flag);
    EXPECT_EQ(same_bits(p, before[0]), found == 1);
    EXPECT_EQ(same_bits(m, b), found == 1);
  }
}

TEST(AdamW, CountsWhatIsApplied) {
  const Array scalars = Array::of(kF64, {kAdamWScalars + 1},
                                  {0.01, 0.5, 0.75, 1e-8, 0.1, -1, -1, 0.7, 3, 42}),
              applied = Array::of(kI64, {}, {1}), out(kF64, {kAdamWScalars + 1});
  const auto step = [&](const View& found) {
    count_adamw(scalars, found, applied, out);
    return applied.at(0);
  };
  EXPECT_EQ(step(Array::of(kI32, {}, {0})), 2);
  EXPECT_EQ(values(out),
            (std::vector<double>{0.01, 0.5, 0.75, 1e-8, 0.1, 1 - 0.25, 1 - 0.5625, 0.7, 3, 42}));
  EXPECT_EQ(step(Array::of(kI32, {}, {1})), 2);
  EXPECT_EQ(out.at(kBiasCorrection1), 1 - 0.25);
  EXPECT_EQ(step(View{}), 3);
  EXPECT_EQ(out.at(kBiasCorrection1), 1 - 0.125);
  EXPECT_THROW(count_adamw(Array(kF64, {3}), View{}, applied, out), ShapeError);
}

// The update of a shard's elements must not depend on where the shard is cut: updating a part gives that part of the whole update.
TEST(AdamW, CutsAndThreadsChangeNothing) {
  constexpr int64_t n = 100003;
  for (const DType state : {kF32, kBF16}) {
    const auto run = [&](int threads, int64_t first, int64_t count) {
      std::vector<Array> all;
      for (int i = 0; i < 4; ++i) all.push_back(Array::random(i < 2 ? kF32 : state, {n}, 1 + i));
      all[3].fill([&](int64_t i) { return std::fabs(all[3].at(i)); });
      View part[4];
      for (int i = 0; i < 4; ++i) part[i] = part_of(all[static_cast<size_t>(i)], first, count);
      with_threads(threads, [&] {
        adamw(part[0], part[1], part[2], part[3],
              Array::of(kF64, {1, 4}, {0, static_cast<double>(count), 1, 1}),
              Array::of(kF32, {kAdamWScalars}, {1e-3, .9, .99, 1e-8, .1, .1, .01, 1, 1}));
      });
      return all;
    };
    const std::vector<Array> one = run(1, 0, n), two = run(2, 0, n), part = run(2, 12345, 777);
    for (const size_t i : {0, 2, 3}) {
      EXPECT_TRUE(same_bits(one[i], two[i])) << i;
      EXPECT_TRUE(same_bits(part_of(one[i], 12345, 777), part_of(part[i], 12345, 777))) << i;
    }
  }
}

TEST(Sgd, MatchesTheDefinition) {
  for (DType d : {kF32, kF64})
    for (int variant = 0; variant < 3; ++variant) {
      const bool buffered = variant > 0, nesterov = variant == 2;
      const Array p = Array::random(d, {kSize}, 1), g = Array::random(d, {kSize}, 2),
                  b = Array::random(d, {kSize}, 3);
      auto wp = values(p), wb = values(b);
      for (int64_t i = 0; i < kSize; ++i) {
        if (segment_of(i) < 0) continue;
        const size_t s = static_cast<size_t>(segment_of(i));
        double grad = 0.5 * g.at(i) + 0.1 * kDecay[s] * wp[i];
        if (buffered) wb[i] = 0.9 * wb[i] + grad, grad = nesterov ? grad + 0.9 * wb[i] : wb[i];
        wp[i] -= 0.01 * kLr[s] * grad;
      }
      sgd(p, g, buffered ? b.view() : View{}, segments(),
          Array::of(kF64, {kSgdScalars}, {0.01, 0.9, 0.1, 0.5, 1}), nesterov);
      EXPECT_LT(scaled_error(p, wp), 2 * epsilon(d)) << variant;
      EXPECT_LT(scaled_error(b, wb), 2 * epsilon(d)) << variant;
    }
}

/// bf16 values as f32, and the bits of an f32.
Array widened(const Array& x) { return Array::of(kF32, x.view().shape, values(x)); }
uint32_t bits(const Array& x, int64_t i) { return std::bit_cast<uint32_t>(x.view().as<float>()[i]); }
bf16 at_rest(const Array& state, int64_t i, uint32_t noise) {
  bf16 out;
  out.bits = rounded_by_chance(bits(state, i), noise);
  return out;
}
Array clipped(const Array& g, float clip) {
  return Array::of(kF32, g.view().shape, [&] {
    std::vector<double> out;
    for (double x : values(g)) out.push_back(clip * static_cast<float>(x));
    return out;
  }());
}

// The update has the bits of an update with f32 state of the same values; the stored state is one of the two nearest bf16 values.
TEST(StateInBf16, IsComputedInF32AndRoundedWhereItRests) {
  const Array before = Array::random(kF32, {kSize}, 1), g = Array::random(kF32, {kSize}, 2);
  Array m = Array::random(kBF16, {kSize}, 3, 0.1), v = Array::random(kBF16, {kSize}, 4, 0.1);
  v.fill([&](int64_t i) { return std::fabs(v.at(i)); });
  const Array p = before.clone(), q = before.clone(), b = m.clone(), wm = widened(m), wv = widened(v),
              old = widened(m);
  const Array scalars =
      Array::of(kF64, {kAdamWScalars}, {0.01, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975, 0.5, 7});
  adamw(p, g, m, v, segments(), scalars);
  adamw(q, g, wm, wv, segments(), scalars);
  EXPECT_TRUE(same_bits(p, q));
  const Array half = clipped(g, 0.5f);
  int up = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    if (segment_of(i) < 0) continue;
    const uint32_t noise = noise_of(bits(before, i), bits(old, i), bits(half, i), noise_key(7));
    ASSERT_EQ(m.view().as<bf16>()[i].bits, at_rest(wm, i, noise).bits) << i;
    ASSERT_EQ(v.view().as<bf16>()[i].bits, at_rest(wv, i, noise >> 16).bits) << i;
    ASSERT_LT(std::fabs(v.at(i) - wv.at(i)), wv.at(i) / 128) << i;
    up += v.at(i) > wv.at(i);
  }
  EXPECT_NEAR(up, 485, 60);

  const Array r = before.clone(), s = before.clone(), wb = widened(b);
  const Array of_sgd = Array::of(kF64, {kSgdScalars}, {0.01, 0.9, 0.1, 0.5, 8});
  sgd(r, g, b, segments(), of_sgd, true);
  sgd(s, g, wb, segments(), of_sgd, true);
  EXPECT_TRUE(same_bits(r, s));
  for (int64_t i = 0; i < kSize; ++i)
    if (segment_of(i) >= 0) {
      const uint32_t noise = noise_of(bits(before, i), bits(old, i), bits(half, i), noise_key(8));
      ASSERT_EQ(b.view().as<bf16>()[i].bits, at_rest(wb, i, noise).bits) << i;
    }
}

// A second moment that decays by a 1000th each step: with rounding to nearest its bits would never change.
TEST(StateInBf16, DecaysAsItsMeanShould) {
  constexpr int64_t n = 4096;
  constexpr int kSteps = 1000;
  for (const bool moves : {true, false}) {
    const Array p = Array::random(kF32, {n}, 1), g = Array::of(kF32, {n}, std::vector<double>(n, 0.0));
    Array m(kBF16, {n}), v(kBF16, {n});
    m.fill([](int64_t) { return -0.5; }), v.fill([](int64_t) { return 0.7; });
    const double start = v.at(0), lr = moves ? 1e-3 : 0;
    for (int step = 1; step <= kSteps; ++step)
      adamw(p, g, m, v, Array::of(kF64, {1, 4}, {0, n, 1, 0}),
            Array::of(kF64, {kAdamWScalars}, {lr, 0.999, 0.999, 1e-8, 0, 1, 1, 1, double(step)}));
    double mean = 0, square = 0;
    for (const double x : values(v)) mean += x / n, square += x * x / n;
    const double want = start * std::pow(0.999, kSteps), spread = std::sqrt(square - mean * mean);
    EXPECT_NEAR(mean, want, 5 * spread / std::sqrt(double(n))) << moves;
    EXPECT_LT(spread, 0.1 * want);
    mean = 0;
    for (const double x : values(m)) mean += x / n;
    EXPECT_NEAR(mean, -0.5 * std::pow(0.999, kSteps), 0.002) << moves;
  }
}

// Elements with the same parameter and gradient must get different noise: Muon's momentum has no parameter, and gradients of unused
// parameters are 0.
TEST(StateInBf16, NoiseIsOfEachElement) {
  constexpr int64_t n = 10'000;
  const Array zero = Array::of(kF32, {n}, std::vector<double>(n, 0.0)), b = Array::random(kBF16, {n}, 1), before = widened(b);
  sgd(zero.clone(), zero, b, Array::of(kF64, {1, 4}, {0, n, 1, 0}), Array::of(kF64, {kSgdScalars}, {-1, 0.95, 0, 1, 3}), false);
  double error = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double exact = static_cast<float>(0.95f * static_cast<float>(before.at(i)));
    error += exact * (b.at(i) - exact), size += exact * exact;
  }
  EXPECT_LT(std::fabs(error / size), 2e-4) << "together they move by what one of them is rounded by";
}

TEST(StateInBf16, KeepsWhatIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const uint32_t noise : {0u, 0xffffu, 0x1234u}) {
    const auto rounded = [&](float x) {
      bf16 out;
      out.bits = rounded_by_chance(std::bit_cast<uint32_t>(x), noise);
      return static_cast<float>(out);
    };
    EXPECT_EQ(rounded(inf), inf);
    EXPECT_EQ(rounded(-inf), -inf);
    EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0x7f800001u))));
    EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0xffffffffu))));
    EXPECT_EQ(rounded(-1.5f), -1.5f);
    EXPECT_EQ(rounded(0.0f), 0.0f);
  }
  // A GPU's own NaN has all bits set, so that noise must not be added to it.
  for (const float g : {inf, std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0x7fffffffu)}) {
    const Array p = Array::random(kF32, {20}, 1), grad(kF32, {20}),
                m = Array::of(kBF16, {20}, std::vector<double>(20, 0.5)), v = m.clone();
    std::fill_n(grad.view().as<float>(), 20, g);
    adamw(p, grad, m, v, Array::of(kF64, {1, 4}, {0, 20, 1, 0}),
          Array::of(kF64, {kAdamWScalars}, {0.01, 0.9, 0.95, 1e-8, 0, 1, 1, 1, 1}));
    for (int64_t i = 0; i < 20; ++i)
      EXPECT_TRUE(std::isnan(g) ? std::isnan(m.at(i)) && std::isnan(v.at(i)) : m.at(i) == g && v.at(i) == g) << i;
  }
}

TEST(StateInBf16, RefusesOtherTypes) {
  const Array p(kF32, {10}), wide(kF64, {10}), half(kF16, {10}), narrow(kBF16, {10}),
      none = Array::of(kF64, {1, 4}, {0, 0, 1, 0}), scalars(kF64, {kAdamWScalars}), of_sgd(kF64, {kSgdScalars});
  EXPECT_THROW(adamw(p, p, half, half, none, scalars), DTypeError);
  EXPECT_THROW(adamw(p, p, narrow, p, none, scalars), DTypeError);
  EXPECT_THROW(adamw(wide, wide, narrow, narrow, none, scalars), DTypeError);
  EXPECT_THROW(sgd(p, p, half, none, of_sgd, false), DTypeError);
  EXPECT_THROW(sgd(wide, wide, narrow, none, of_sgd, false), DTypeError);
}

TEST(Optimizer, AClipScaleTakesThePlaceOfItsElement) {
  const Array p = Array::random(kF32, {kSize}, 1), q = p.clone(),
              g = Array::random(kF32, {kSize}, 2);
  sgd(p, g, View{}, segments(), Array::of(kF64, {kSgdScalars}, {0.01, 0, 0.1, 1, 1}), false,
      Array::of(kF64, {}, {0.25}));
  sgd(q, g, View{}, segments(), Array::of(kF64, {kSgdScalars}, {0.01, 0, 0.1, 0.25, 1}), false);
  EXPECT_TRUE(same_bits(p, q));
}

TEST(SignStep, MovesByARateAgainstTheSign) {
  for (DType d : {kF32, kF64})
    for (int found : {-1, 0, 1}) {
      const Array p = Array::of(d, {6}, {1, 2, 3, 4, 5, 6}),
                  g = Array::of(d, {6}, {1e-30, -7, 0, -0.0, NAN, INFINITY}),
                  flag = Array::of(kI32, {}, {double(found)});
      sign_step(p, g, 0.25, found < 0 ? View{} : flag.view());
      const std::vector<double> moved = {0.75, 2.25, 3, 4, 5, 5.75}, as_they_were = {1, 2, 3, 4, 5, 6};
      EXPECT_EQ(values(p), found == 1 ? as_they_were : moved);
    }
  const Array p(kF32, {6}), wide(kF64, {6}), longer(kF32, {7}), half(kBF16, {6});
  EXPECT_THROW(sign_step(p, wide, 1), DTypeError);
  EXPECT_THROW(sign_step(half, half, 1), DTypeError);
  EXPECT_THROW(sign_step(p, longer, 1), ShapeError);
}

TEST(Optimizer, RefusesSegmentsOutsideTheShard) {
  const Array p(kF32, {10}), scalars(kF64, {kSgdScalars});
  EXPECT_THROW(sgd(p, p, View{}, Array::of(kF64, {1, 4}, {0, 11, 1, 0}), scalars, false), ShapeError);
  EXPECT_THROW(sgd(p, p, View{}, Array::of(kF64, {1, 3}, {0, 1, 1}), scalars, false), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
