#include "sheaf/kernels/softmax.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

TEST(Softmax, MatchesTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Shape& shape :
         {Shape{4, 5}, Shape{2, 3, 64}, Shape{7, 1}, Shape{3, 1000}, Shape{40}}) {
      const Array x = Array::random(d, shape, 1, 3), dy = Array::random(d, shape, 2);
      const int64_t width = shape.back(), rows = shape.numel() / width;
      std::vector<double> p(shape.numel()), logp(shape.numel()), dp(shape.numel()),
          dlog(shape.numel());
      for (int64_t r = 0; r < rows; ++r) {
        double most = -INFINITY, sum = 0, dot = 0, total = 0;
        for (int64_t i = 0; i < width; ++i) most = std::max(most, x.at(r * width + i));
        for (int64_t i = 0; i < width; ++i) sum += std::exp(x.at(r * width + i) - most);
        for (int64_t i = r * width; i < (r + 1) * width; ++i) {
          logp[i] = x.at(i) - most - std::log(sum), p[i] = std::exp(logp[i]);
          dot += p[i] * dy.at(i), total += dy.at(i);
        }
        for (int64_t i = r * width; i < (r + 1) * width; ++i)
          dp[i] = p[i] * (dy.at(i) - dot), dlog[i] = dy.at(i) - p[i] * total;
      }
      const Array y(d, shape), ylog(d, shape), dx(d, shape), dxlog(d, shape);
      softmax(x, y), log_softmax(x, ylog);
      softmax_backward(y, dy, dx), log_softmax_backward(ylog, dy, dxlog);
      EXPECT_LT(scaled_error(y, p), 4 * epsilon(d)) << name(d) << shape.to_string();
      EXPECT_LT(scaled_error(ylog, logp), 4 * epsilon(d)) << name(d) << shape.to_string();
      if (width > 1) {
        EXPECT_LT(scaled_error(dx, dp), 8 * epsilon(d)) << name(d) << shape.to_string();
        EXPECT_LT(scaled_error(dxlog, dlog), 8 * epsilon(d)) << name(d) << shape.to_string();
      }
    }
}

TEST(Softmax, MaskedAndLargeValues) {
  const Array x = Array::of(kF32, {2, 4}, {-INFINITY, 3, -INFINITY, 3, 1000, 0, -1000, 1000});
  const Array y(kF32, {2, 4});
  softmax(x, y);
  EXPECT_EQ(values(y), (std::vector<double>{0, 0.5, 0, 0.5, 0.5, 0, 0, 0.5}));
}

TEST(Softmax, StridesAndThreadsChangeNothing) {
  const Shape shape{3, 300, 70};
  const Array x = Array::random(kF32, shape, 1),
              strided = Array::random(kF32, shape, 1, 1, {80, 300, 1}), one(kF32, shape),
              two(kF32, shape), three(kF32, shape);
  with_threads(1, [&] { softmax(x, one); });
  with_threads(2, [&] { softmax(x, two); });
  softmax(strided, three);
  EXPECT_TRUE(same_bits(one, two));
  EXPECT_TRUE(same_bits(one, three));
  softmax(Array(kF32, {0, 4}), Array(kF32, {0, 4}));
}

}  // namespace
}  // namespace sheaf::kernels::cpu
