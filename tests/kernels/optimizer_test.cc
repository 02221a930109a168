#include "sheaf/kernels/optimizer.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

constexpr int64_t kSize = 1000;
/// Padding at 300..320 and from 990.
Array segments() { return Array::of(kI64, {3, 3}, {0, 300, 1, 320, 777, 0, 777, 990, 1}); }
int segment_of(int64_t i) { return i < 300 ? 1 : i < 320 ? -1 : i < 777 ? 0 : i < 990 ? 1 : -1; }

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
        if (segment_of(i) == 1) wp[i] -= lr * wd * wp[i];
        wp[i] -= lr * (wm[i] / c1) / (std::sqrt(wv[i] / c2) + eps);
      }
      adamw(p, g, m, v, segments(),
            Array::of(kF64, {kAdamWScalars}, {lr, b1, b2, eps, wd, c1, c2, clip}));
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
          Array::of(kF64, {kAdamWScalars}, {0.01, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975, 1}),
          found ? nan.view() : View{}, flag);
    EXPECT_EQ(same_bits(p, before[0]), found == 1);
    EXPECT_EQ(same_bits(m, before[1]), found == 1);
    EXPECT_EQ(same_bits(v, before[2]), found == 1);
    const Array b = m.clone();
    sgd(p, p, m, segments(), Array::of(kF64, {kSgdScalars}, {0.1, 0.9, 0.1, 1}), true, {}, flag);
    EXPECT_EQ(same_bits(p, before[0]), found == 1);
    EXPECT_EQ(same_bits(m, b), found == 1);
  }
}

TEST(AdamW, CountsWhatIsApplied) {
  const Array scalars = Array::of(kF64, {kAdamWScalars + 1},
                                  {0.01, 0.5, 0.75, 1e-8, 0.1, -1, -1, 0.7, 42}),
              applied = Array::of(kI64, {}, {1}), out(kF64, {kAdamWScalars + 1});
  const auto step = [&](const View& found) {
    count_adamw(scalars, found, applied, out);
    return applied.at(0);
  };
  EXPECT_EQ(step(Array::of(kI32, {}, {0})), 2);
  EXPECT_EQ(values(out),
            (std::vector<double>{0.01, 0.5, 0.75, 1e-8, 0.1, 1 - 0.25, 1 - 0.5625, 0.7, 42}));
  EXPECT_EQ(step(Array::of(kI32, {}, {1})), 2);
  EXPECT_EQ(out.at(kBiasCorrection1), 1 - 0.25);
  EXPECT_EQ(step(View{}), 3);
  EXPECT_EQ(out.at(kBiasCorrection1), 1 - 0.125);
  EXPECT_THROW(count_adamw(Array(kF64, {3}), View{}, applied, out), ShapeError);
}

// A shard's elements must not depend on where the shard is cut: the update of a part is the part of
// the update.
TEST(AdamW, CutsAndThreadsChangeNothing) {
  auto run = [](int threads, int64_t first, int64_t count) {
    const Array all[4] = {Array::random(kF32, {100003}, 1), Array::random(kF32, {100003}, 2),
                          Array::random(kF32, {100003}, 3), Array::random(kF32, {100003}, 4)};
    for (int64_t i = 0; i < 100003; ++i)
      all[3].view().as<float>()[i] = std::fabs(all[3].view().as<float>()[i]);
    View part[4];
    for (int i = 0; i < 4; ++i)
      part[i] = View::dense(all[i].view().as<float>() + first, kF32, {count});
    with_threads(threads, [&] {
      adamw(part[0], part[1], part[2], part[3],
            Array::of(kI64, {1, 3}, {0, static_cast<double>(count), 1}),
            Array::of(kF32, {kAdamWScalars}, {1e-3, .9, .99, 1e-8, .1, .1, .01, 1}));
    });
    return all[0];
  };
  const Array one = run(1, 0, 100003);
  EXPECT_TRUE(same_bits(one, run(2, 0, 100003)));
  const Array part = run(2, 12345, 777);
  EXPECT_TRUE(same_bits(View::dense(one.view().as<float>() + 12345, kF32, {777}),
                        View::dense(part.view().as<float>() + 12345, kF32, {777})));
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
        double grad = 0.5 * g.at(i) + (segment_of(i) == 1 ? 0.1 * wp[i] : 0);
        if (buffered) wb[i] = 0.9 * wb[i] + grad, grad = nesterov ? grad + 0.9 * wb[i] : wb[i];
        wp[i] -= 0.01 * grad;
      }
      sgd(p, g, buffered ? b.view() : View{}, segments(),
          Array::of(kF64, {kSgdScalars}, {0.01, 0.9, 0.1, 0.5}), nesterov);
      EXPECT_LT(scaled_error(p, wp), 2 * epsilon(d)) << variant;
      EXPECT_LT(scaled_error(b, wb), 2 * epsilon(d)) << variant;
    }
}

TEST(Optimizer, AClipScaleTakesThePlaceOfItsElement) {
  const Array p = Array::random(kF32, {kSize}, 1), q = p.clone(),
              g = Array::random(kF32, {kSize}, 2);
  sgd(p, g, View{}, segments(), Array::of(kF64, {kSgdScalars}, {0.01, 0, 0.1, 1}), false,
      Array::of(kF64, {}, {0.25}));
  sgd(q, g, View{}, segments(), Array::of(kF64, {kSgdScalars}, {0.01, 0, 0.1, 0.25}), false);
  EXPECT_TRUE(same_bits(p, q));
}

TEST(Optimizer, RefusesSegmentsOutsideTheShard) {
  const Array p(kF32, {10}), scalars(kF64, {kSgdScalars});
  EXPECT_THROW(sgd(p, p, View{}, Array::of(kI64, {1, 3}, {0, 11, 0}), scalars, false), ShapeError);
  EXPECT_THROW(sgd(p, p, View{}, Array::of(kI64, {1, 2}, {0, 1}), scalars, false), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
