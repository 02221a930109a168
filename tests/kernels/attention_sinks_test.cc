#include "sheaf/kernels/attention_sinks.h"

#include <gmock/gmock.h>

#include "sheaf/kernels/attention.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

// Softmax over the scores of all keys and one more (the sink), which has no value.
TEST(AttentionSinks, MatchTheDefinition) {
  const int64_t B = 2, T = 3, S = 5, H = 4, G = 2, D = 20, E = 35;
  for (DType d : {kF64, kF32, kBF16, kF16}) {
    const Array q = Array::random(d, {B, T, H, D}, 1), k = Array::random(d, {B, S, G, D}, 2), v = Array::random(d, {B, S, G, E}, 3);
    const Array sinks = Array::random(statistics_of(d), {H}, 4, 2);
    const Array out(d, {B, T, H, E}), lse(statistics_of(d), {B, H, T});
    const AttentionMask mask(/*causal=*/true, {}, /*window=*/3);
    attention(q, k, v, mask, 0.3, out, lse, Scratch(attention_workspace(q, k, v, mask, out, lse)));
    attention_sinks(sinks, out, lse);
    std::vector<double> want(static_cast<size_t>(out.view().numel()), 0.0), want_lse(static_cast<size_t>(B * H * T));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < H; ++h) {
          double sum = std::exp(sinks.at(h));
          std::vector<double> weighted(static_cast<size_t>(E), 0.0);
          const int64_t last = t + S - T, g = h / (H / G);
          for (int64_t s = std::max<int64_t>(0, last - 2); s <= last; ++s) {
            double score = 0;
            for (int64_t i = 0; i < D; ++i) score += q.at(((b * T + t) * H + h) * D + i) * k.at(((b * S + s) * G + g) * D + i);
            const double p = std::exp(0.3 * score);
            sum += p;
            for (int64_t e = 0; e < E; ++e) weighted[static_cast<size_t>(e)] += p * v.at(((b * S + s) * G + g) * E + e);
          }
          for (int64_t e = 0; e < E; ++e) want[static_cast<size_t>(((b * T + t) * H + h) * E + e)] = weighted[static_cast<size_t>(e)] / sum;
          want_lse[static_cast<size_t>((b * H + h) * T + t)] = std::log(sum);
        }
    EXPECT_LT(scaled_error(out, want), d == kF64 ? 1e-14 : 4 * epsilon(d)) << name(d);
    EXPECT_LT(scaled_error(lse, want_lse), d == kF64 ? 1e-14 : 1e-6 + (d == kBF16 ? 4 * epsilon(d) : 0)) << name(d);
  }
}

// In the middle of a packed tensor, statistics in any layout, and strided sinks.
TEST(AttentionSinks, TakeAnyStrides) {
  for (DType d : {kF64, kF32, kBF16, kF16}) {
    const DType exact = statistics_of(d);
    const Shape shape{2, 3, 5, 19}, of_rows{2, 5, 3}, strides{700, 230, 40, 1}, of_strides{1, 14, 2};
    const Array sinks = Array::random(exact, {5}, 1, 1, {3}), dense_sinks = converted(exact, sinks);
    const Array out = Array::random(d, shape, 2, 1, strides), dense_out = converted(d, out);
    const Array lse = Array::random(exact, of_rows, 3, 1, of_strides), dense_lse = converted(exact, lse);
    attention_sinks(sinks, out, lse);
    attention_sinks(dense_sinks, dense_out, dense_lse);
    EXPECT_TRUE(same_bits(out, dense_out) && same_bits(lse, dense_lse)) << name(d);

    const Array dout = Array::random(d, shape, 4, 1, strides), d_of(exact, of_rows, of_strides), dense_d_of(exact, of_rows);
    attention_sinks_backward(sinks, out, lse, dout, d_of);
    attention_sinks_backward(dense_sinks, dense_out, dense_lse, converted(d, dout), dense_d_of);
    EXPECT_TRUE(same_bits(d_of, dense_d_of)) << name(d);
  }
}

TEST(AttentionSinks, GradientsMatchTheDefinition) {
  const int64_t B = 2, T = 3, H = 5, E = 35;
  for (DType d : {kF64, kF32, kBF16, kF16}) {
    const DType exact = statistics_of(d);
    const Array sinks = Array::random(exact, {H}, 1), lse = Array::random(exact, {B, H, T}, 2);
    const Array out = Array::random(d, {B, T, H, E}, 3), dout = Array::random(d, {B, T, H, E}, 4), got(exact, {B, H, T});
    attention_sinks_backward(sinks, out, lse, dout, got);
    std::vector<double> want(static_cast<size_t>(B * H * T));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t t = 0; t < T; ++t) {
          double dot = 0;
          for (int64_t e = 0; e < E; ++e) dot += out.at(((b * T + t) * H + h) * E + e) * dout.at(((b * T + t) * H + h) * E + e);
          const int64_t at = (b * H + h) * T + t;
          want[static_cast<size_t>(at)] = -std::exp(sinks.at(h) - lse.at(at)) * dot;
        }
    EXPECT_LT(scaled_error(got, want), d == kF64 ? 1e-14 : 1e-6) << name(d);
  }
}

// No keys and a sink, keys and none, neither, scores out of the range of exp, and NaN.
TEST(AttentionSinks, ExtremeScores) {
  const Array sinks = Array::of(kF32, {7}, {1.5, -INFINITY, -INFINITY, 300, -300, NAN, 0});
  const Array out = Array::of(kF32, {1, 1, 7, 1}, {0, 2, 0, 2, 2, 2, 2});
  const Array lse = Array::of(kF32, {1, 7, 1}, {-INFINITY, 0.5, -INFINITY, -300, 300, 0.5, NAN});
  attention_sinks(sinks, out, lse);
  const auto is_nan = [](double x) { return std::isnan(x); };
  EXPECT_THAT(values(lse), ::testing::ElementsAre(1.5, 0.5, -INFINITY, 300, 300, ::testing::Truly(is_nan), ::testing::Truly(is_nan)));
  EXPECT_THAT(values(out), ::testing::ElementsAre(0, 2, 0, 0, 2, ::testing::Truly(is_nan), ::testing::Truly(is_nan)));
  const Array ones = Array::of(kF32, {1, 1, 7, 1}, {1, 1, 1, 1, 1, 1, 1}), d(kF32, {1, 7, 1});
  attention_sinks_backward(sinks, out, lse, ones, d);
  EXPECT_THAT(values(d), ::testing::ElementsAre(0, 0, 0, 0, 0, ::testing::Truly(is_nan), ::testing::Truly(is_nan)));
}

TEST(AttentionSinks, RefuseOtherOperands) {
  const Array out(kBF16, {2, 3, 4, 8}), lse(kF32, {2, 4, 3});
  EXPECT_THROW(attention_sinks(Array(kF32, {3}), out, lse), ShapeError);
  EXPECT_THROW(attention_sinks(Array(kF32, {4}), out, Array(kF32, {2, 3, 4})), ShapeError);
  EXPECT_THROW(attention_sinks(Array(kBF16, {4}), out, lse), DTypeError);
  EXPECT_THROW(attention_sinks_backward(Array(kF32, {4}), out, lse, Array(kF32, {2, 3, 4, 8}), lse), DTypeError);
  EXPECT_THROW(attention_sinks_backward(Array(kF32, {4}), out, lse, out, Array(kF32, {2, 4})), ShapeError);
}

TEST(AttentionSinks, TakeNothing) {
  const Array out(kF32, {0, 3, 4, 8}), lse(kF32, {0, 4, 3});
  attention_sinks(Array(kF32, {4}), out, lse);
  attention_sinks_backward(Array(kF32, {4}), out, lse, out, lse);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
