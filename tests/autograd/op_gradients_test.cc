#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {

// The gradients of a weight and a bias come from one op; each may be differentiated without the other.
TEST(LinearGradients, EachAloneHasADerivative) {
  const auto x = Tensor::from<double>({1, 2, 3, 4, 5, 6}, {3, 2}), w = Tensor::from<double>({0.5, -1, 2, 0.25}, {2, 2}),
             b = Tensor::from<double>({0.1, 0.2}, {2}), u = Tensor::from<double>({3, -1, 2, 5}, {2, 2}),
             v = Tensor::from<double>({2, -3}, {2});
  for (bool of_weight : {true, false}) {
    Recording recording;
    for (const Tensor& t : {x, w, b}) recording.watch(t);
    const Tensor y = linear(x, w, b);
    const auto g = recording.gradient(sum(0.5 * y * y), std::vector{w, b}, {.keep = true});  // dy = y
    const Tensor dx = recording.gradient(of_weight ? sum(g[0] * u) : sum(g[1] * v), std::vector{x})[0];
    // sum(yᵀx * u) = sum(y * x uᵀ), in which x occurs twice; sum(y v).
    const Tensor want = of_weight ? matmul(y, u) + matmul(matmul(x, transpose(u, 0, 1)), w)
                                  : matmul(expand(v, {3, 2}), w);
    const auto got = dx.to_vector<double>(), wanted = want.to_vector<double>();
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-12) << of_weight << i;
  }
}

// Also at the limits, beyond them, and for NaN.
TEST(ClampedSwiglu, IsWhatItsPartsAre) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> gates, ups;
  for (const double gate : {0.5, -5.0, 2.0, 2.5, kInf, -kInf, kNan})
    for (const double up : {0.5, -1.5, 2.0, -2.0, 3.0, -3.0, kInf, -kInf, kNan}) gates.push_back(gate), ups.push_back(up);
  const auto gate = Tensor::from<double>(gates, {7, 9}), up = Tensor::from<double>(ups, {7, 9}), dy = randn(gate.type(), Key{1});
  const auto results = [&](bool parts) {
    Recording recording;
    for (const Tensor& t : {gate, up}) recording.watch(t);
    const Tensor g = clamp(gate, -kInf, 2);
    const Tensor y = parts ? g * sigmoid(0.7 * g) * (clamp(up, -2, 2) + 1.0) : clamped_swiglu(gate, up, {.alpha = 0.7, .limit = 2});
    std::vector<Tensor> out = recording.gradient(sum(y * dy), std::vector{gate, up});
    out.push_back(y);
    return out;
  };
  const std::vector<Tensor> got = results(false), want = results(true);
  for (size_t t = 0; t < want.size(); ++t) {
    const auto is = got[t].to_vector<double>(), should = want[t].to_vector<double>();
    for (size_t i = 0; i < should.size(); ++i)
      EXPECT_TRUE(std::abs(is[i] - should[i]) < 1e-13 || (std::isnan(is[i]) && std::isnan(should[i])))
          << t << " of " << gates[i] << " and " << ups[i] << ": " << is[i] << ", not " << should[i];
  }
}

TEST(ClampedSwiglu, WhatItCannotTake) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  const Tensor x = zeros({2, 3}), whole = zeros({2, 3}, kI32);
  for (const double alpha : {0.0, -1.0, kInf, kNan}) EXPECT_THROW(clamped_swiglu(x, x, {.alpha = alpha}), ConfigError) << alpha;
  for (const double limit : {0.0, -1.0, -kInf, kNan}) EXPECT_THROW(clamped_swiglu(x, x, {.limit = limit}), ConfigError) << limit;
  EXPECT_THROW(clamped_swiglu(x, zeros({3})), ShapeError);
  EXPECT_THROW(clamped_swiglu(x, zeros({2, 3}, kBF16)), DTypeError);
  EXPECT_THROW(clamped_swiglu(whole, whole), DTypeError);
}

// On a CPU the ops around a gelu are computed as separate parts.
TEST(GeluLinear, HasTheBitsOfItsParts) {
  for (DType d : {kF32, kBF16}) {
    std::vector<Tensor> x;
    for (const Shape& shape : {Shape{3, 7, 24}, Shape{40, 24}, Shape{40}, Shape{24, 40}, Shape{24}})
      x.push_back(cast(randn({kF32, shape, {}}, Key{x.size() + 1}), d));
    const auto results = [&](bool fused) {
      Recording recording;
      for (const Tensor& t : x) recording.watch(t);
      const Tensor y = fused ? gelu_linear(linear_gelu(x[0], x[1], x[2]), x[3], x[4])
                             : linear(gelu(linear(x[0], x[1], x[2]), GeluKind::tanh), x[3], x[4]);
      std::vector<Tensor> out = recording.gradient(sum(cast(y * y, kF32)), x);
      out.push_back(y);
      return out;
    };
    const std::vector<Tensor> got = results(true), want = results(false);
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(identical(got[i], want[i])) << name(d) << i;
  }
}

// Gradients that are computed together with the loss, before it is scaled, must not lose what the scale protects from underflow.
TEST(LinearCrossEntropy, TheScaleOfALossReachesRareTokensInF16) {
  const auto x = cast(Tensor::from<float>({1, 0, 1, 0.5, 1, 0}, {3, 2}), kF16),
             w = cast(Tensor::from<float>({0, 0, -18, 0, -17, 0}, {3, 2}), kF16);
  const auto targets = Tensor::from<int32_t>({0, 0, 0}, {3});
  for (const bool recompute : {false, true}) {
    Recording recording;
    for (const Tensor& t : {x, w}) recording.watch(t);
    const Tensor loss = linear_cross_entropy(x, w, targets, {.recompute = recompute});
    const auto g = recording.gradient(loss * 65536.0, std::vector{x, w});
    const double all = 1 + std::exp(-18.0) + std::exp(-17.0);
    const double want[] = {65536 * std::exp(-18.0) / all, 65536 * std::exp(-17.0) / all};
    const auto dw = g[1].to_vector<double>();
    for (const int token : {1, 2}) EXPECT_NEAR(dw[2 * token], want[token - 1], 0.01 * want[token - 1]) << recompute;
    const double dx = (-18 * want[0] - 17 * want[1]) / 3;
    EXPECT_NEAR(g[0].to_vector<double>()[0], dx, -0.01 * dx) << recompute;
  }
}

// A row's z-loss is not shared among its classes.
TEST(CrossEntropy, SmoothsLabelsBesideAZLossAsThatOfALinearHeadDoes) {
  const Tensor x = randn({kF64, {4, 3}, {}}, Key{1}), w = randn({kF64, {5, 3}, {}}, Key{2});
  const auto targets = Tensor::from<int64_t>({4, -1, 0, 2}, {4});
  const auto results = [&](bool head) {
    Recording recording;
    for (const Tensor& t : {x, w}) recording.watch(t);
    const CrossEntropyOptions options{.z_loss = 0.3, .label_smoothing = 0.2};
    const Tensor loss = head ? linear_cross_entropy(x, w, targets, options) : cross_entropy(linear(x, w), targets, options);
    std::vector<Tensor> out = recording.gradient(loss, std::vector{x, w});
    out.push_back(loss);
    return out;
  };
  const std::vector<Tensor> got = results(false), want = results(true);
  for (size_t t = 0; t < want.size(); ++t) {
    const auto is = got[t].to_vector<double>(), should = want[t].to_vector<double>();
    for (size_t i = 0; i < should.size(); ++i) EXPECT_NEAR(is[i], should[i], 1e-13) << t << ' ' << i;
  }
}

// Their logits may be anything: a row of padding, say.
TEST(CrossEntropy, IgnoredRowsMayBeInfinite) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x = Tensor::from<double>({1, 2, 3, 0, -inf, 1, 5, inf, 2}, {3, 3}), alone = Tensor::from<double>({1, 2, 3}, {1, 3});
  const auto targets = Tensor::from<int64_t>({2, -1, -1}, {3}), target = Tensor::from<int64_t>({2}, {1});
  const CrossEntropyOptions options{.divide_by = 1, .z_loss = 0.3, .label_smoothing = 0.2};
  EXPECT_DOUBLE_EQ(cross_entropy(x, targets, options).item(), cross_entropy(alone, target, options).item());
  const Tensor identity = eye(3, kF64);
  const Tensor finite = Tensor::from<double>({1, 2, 3, 0, -1e308, 1e308, 5, 1e308, 1e308}, {3, 3});  // their sums are infinite
  EXPECT_NEAR(linear_cross_entropy(finite, identity, targets, {.divide_by = 1, .label_smoothing = 0.2}).item(),
              cross_entropy(alone, target, {.divide_by = 1, .label_smoothing = 0.2}).item(), 1e-12);
}

// As many as f16 cannot count, nor bf16 exactly.
TEST(Max, SharesItsGradientAmongAllThatAreEqual) {
  for (const auto& [dtype, n] : {std::pair{kF16, 70000}, std::pair{kBF16, 257}}) {
    Recording r;
    const Tensor x = r.watch(zeros({n}, dtype));
    const Tensor g[] = {x};
    const double each = cast(r.gradient(max(x) * 1024.0, g)[0], kF64).to_vector<double>()[0];
    EXPECT_NEAR(each, 1024.0 / n, 1024.0 / n / 250) << name(dtype);
  }
}

TEST(Pow, SlopesWhereOneIsZero) {
  Recording r;
  const Tensor a = r.watch(Tensor::from<double>({0, 0, 2}, {3})), b = r.watch(Tensor::from<double>({0, 2, 0}, {3}));
  const Tensor both[] = {a, b}, one[] = {a};
  const auto slopes = r.gradient(sum(pow(a, b)), both);
  EXPECT_EQ(slopes[0].to_vector<double>(), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(slopes[1].to_vector<double>(), (std::vector<double>{0, 0, std::log(2.0)}));
  const auto of = [&](const Tensor& y) { return r.gradient(sum(y), one)[0].to_vector<double>(); };
  EXPECT_EQ(of(pow(a, 0.0)), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(of(pow(a, 1.0)), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(of(pow(0.0, a)), (std::vector<double>{0, 0, 0}));
}

// d/db d/da aᵇ = aᵇ⁻¹ (1 + b log a) = d/da d/db aᵇ, and the other two.
TEST(Pow, SecondDerivativesWhereOneIsZero) {
  Recording r;
  const Tensor a = r.watch(Tensor::from<double>({2, 4, 0, 0, 0}, {5})), b = r.watch(Tensor::from<double>({0, 0, 0, 2, 3}, {5}));
  const Tensor both[] = {a, b};
  const auto first = r.gradient(sum(pow(a, b)), both, {.keep = true});
  const auto of_a = r.gradient(sum(first[0]), both, {.keep = true}), of_b = r.gradient(sum(first[1]), both);
  const auto expect = [](const Tensor& got, const std::vector<double>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      if (!std::isnan(want[i])) { EXPECT_NEAR(got.to_vector<double>()[i], want[i], 1e-12) << i; }
    }
  };
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  expect(of_a[0], {0, 0, 0, 2, 0});
  for (const Tensor& mixed : {of_a[1], of_b[0]}) expect(mixed, {0.5, 0.25, kNone, 0, 0});
  expect(of_b[1], {std::log(2) * std::log(2), std::log(4) * std::log(4), kNone, 0, 0});
}

TEST_P(Op, Gradient) { EXPECT_EQ(check_gradient(GetParam()), ""); }
TEST_P(Op, SecondGradient) { EXPECT_EQ(check_second_gradient(GetParam()), ""); }

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
