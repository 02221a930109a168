#include "sheaf/kernels/elementwise.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/tests/kernels/views.h"

namespace sheaf {
namespace {
using kernels::BinaryOp;
using kernels::BackwardOp;
using kernels::UnaryOp;
namespace cpu = kernels::cpu;
using test::Buffer;
using test::scaled_error;
using test::tolerance;

double phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct UnaryCase {
  UnaryOp op;
  double lo, hi;
  double (*f)(double);
};
const UnaryCase kUnary[] = {
    {UnaryOp::neg, -2, 2, [](double x) { return -x; }},
    {UnaryOp::exp, -10, 10, [](double x) { return std::exp(x); }},
    {UnaryOp::log, 1e-3, 50, [](double x) { return std::log(x); }},
    {UnaryOp::sqrt, 0, 50, [](double x) { return std::sqrt(x); }},
    {UnaryOp::rsqrt, 1e-2, 50, [](double x) { return 1 / std::sqrt(x); }},
    {UnaryOp::reciprocal, 0.1, 3, [](double x) { return 1 / x; }},
    {UnaryOp::tanh, -6, 6, [](double x) { return std::tanh(x); }},
    {UnaryOp::sigmoid, -12, 12, sigmoid},
    {UnaryOp::abs, -2, 2, [](double x) { return std::abs(x); }},
    {UnaryOp::relu, -2, 2, [](double x) { return x > 0 ? x : 0; }},
    {UnaryOp::silu, -12, 12, [](double x) { return x * sigmoid(x); }},
    {UnaryOp::gelu_tanh, -6, 6, gelu_tanh},
    {UnaryOp::gelu_exact, -6, 6, [](double x) { return x * phi(x); }},
    {UnaryOp::square, -3, 3, [](double x) { return x * x; }},
    {UnaryOp::sign, -3, 3, [](double x) { return double(x > 0) - double(x < 0); }},
    {UnaryOp::sin, -9, 9, [](double x) { return std::sin(x); }},
    {UnaryOp::cos, -9, 9, [](double x) { return std::cos(x); }},
    {UnaryOp::softplus, -12, 12, [](double x) { return std::log1p(std::exp(x)); }},
    {UnaryOp::floor, -9, 9, [](double x) { return std::floor(x); }},
    {UnaryOp::round, -9, 9, [](double x) { return std::nearbyint(x); }},
    {UnaryOp::log1p, -0.99, 50, [](double x) { return std::log1p(x); }},
    {UnaryOp::expm1, -10, 10, [](double x) { return std::expm1(x); }},
    {UnaryOp::erf, -4, 4, [](double x) { return std::erf(x); }},
};

TEST(Unary, AgreesWithF64OnEveryFloatingTypeAndLayout) {
  for (const DType dtype : {kF64, kF32, kBF16, kF16}) {
    for (const UnaryCase& c : kUnary) {
      for (const auto& order : {std::vector<int>{0, 1, 2}, std::vector<int>{2, 0, 1}}) {
        Buffer x(dtype, {3, 7, 129}, order, order[0] ? 1 : 0), out(dtype, {3, 7, 129});
        x.random(7, c.lo, c.hi);
        cpu::unary(c.op, x.view(), out.view());
        std::vector<double> want = x.values();
        for (double& v : want) v = c.f(v);
        EXPECT_LE(scaled_error(out.values(), want), tolerance(dtype))
            << static_cast<int>(c.op) << ' ' << name(dtype);
      }
    }
  }
}

// NaN of either sign: what an operand's payload and sign become must not depend on where vectors end.
void scatter_nans(const Buffer& x, int64_t every, int64_t from = 0) {
  for (int64_t i = from; i < x.numel(); i += every)
    *reinterpret_cast<uint32_t*>(x.at(i)) = (i % 2 ? 0x7fc00000u : 0xffc00000u) + static_cast<uint32_t>(i);
}

TEST(Unary, TailBitsEqualBodyBits) {
  for (const UnaryCase& c : kUnary) {
    Buffer x(kF32, {1000}), whole(kF32, {1000});
    x.random(3, c.lo, c.hi);
    scatter_nans(x, 3, 1);
    cpu::unary(c.op, x.view(), whole.view());
    for (const int64_t n : {1, 3, 7, 8, 9, 31, 33}) {
      for (const int64_t start : {0, 1, 5, 900}) {
        View piece = x.view();
        piece.data = x.at(start), piece.shape = {n};
        Buffer out(kF32, {n});
        cpu::unary(c.op, piece, out.view());
        EXPECT_EQ(0, std::memcmp(out.at(0), whole.at(start), static_cast<size_t>(n) * 4))
            << static_cast<int>(c.op);
      }
    }
  }
}

TEST(Binary, TailBitsOfGatesAndGradientsEqualBodyBits) {
  Buffer x(kF32, {1000}), y(kF32, {1000}), dy(kF32, {1000});
  x.random(3, -5, 5), y.random(4, -5, 5), dy.random(5, -5, 5);
  scatter_nans(x, 3), scatter_nans(y, 2), scatter_nans(dy, 5);  // each of the three, two and all of them
  using Call = std::function<void(const View& x, const View& y, const View& dy, const View& out)>;
  std::vector<Call> calls = {
      [](const View& a, const View& b, const View&, const View& out) { cpu::swiglu(a, b, out); },
      [](const View& a, const View& b, const View&, const View& out) { cpu::clamped_swiglu(a, b, 1.7, INFINITY, out); }};
  for (const BackwardOp op : {BackwardOp::gelu_exact, BackwardOp::gelu_tanh, BackwardOp::silu})
    calls.push_back([op](const View& a, const View&, const View& d, const View& out) { cpu::activation_backward(op, a, d, out); });
  for (const bool clamped : {false, true})
    for (const bool of_up : {false, true})
      calls.push_back([=](const View& a, const View& b, const View& d, const View& out) {
        const Buffer other(kF32, {out.shape[0]});
        const View dgate = of_up ? other.view() : out, dup = of_up ? out : other.view();
        if (clamped) cpu::clamped_swiglu_backward(a, b, d, 1.7, INFINITY, dgate, dup);
        else cpu::swiglu_backward(a, b, d, dgate, dup);
      });
  for (size_t i = 0; i < calls.size(); ++i) {
    Buffer whole(kF32, {1000});
    calls[i](x.view(), y.view(), dy.view(), whole.view());
    for (const int64_t n : {1, 3, 7, 8, 9, 31, 33})
      for (const int64_t start : {0, 1, 5, 900}) {
        View a = x.view(), b = y.view(), d = dy.view();
        a.data = x.at(start), b.data = y.at(start), d.data = dy.at(start), a.shape = b.shape = d.shape = {n};
        Buffer out(kF32, {n});
        calls[i](a, b, d, out.view());
        EXPECT_EQ(0, std::memcmp(out.at(0), whole.at(start), static_cast<size_t>(n) * 4)) << i << ", " << n << " from " << start;
      }
  }
}

TEST(Unary, SpecialValues) {
  const double inf = INFINITY;
  Buffer x(kF32, {6}), y(kF32, {6});
  const double in[] = {inf, -inf, NAN, 0.0, 1000, -1000};
  x.fill([&](int64_t i) { return in[i]; });
  auto run = [&](UnaryOp op) {
    cpu::unary(op, x.view(), y.view());
    return y.values();
  };
  EXPECT_EQ(scaled_error(run(UnaryOp::exp), {inf, 0, NAN, 1, inf, 0}), 0);
  EXPECT_EQ(scaled_error(run(UnaryOp::log), {inf, NAN, NAN, -inf, std::log(1000.0), NAN}, 1) < 1e-6,
            true);
  EXPECT_EQ(scaled_error(run(UnaryOp::tanh), {1, -1, NAN, 0, 1, -1}), 0);
  EXPECT_EQ(scaled_error(run(UnaryOp::sigmoid), {1, 0, NAN, 0.5, 1, 0}), 0);
  EXPECT_EQ(scaled_error(run(UnaryOp::relu), {inf, 0, NAN, 0, 1000, 0}), 0);
  EXPECT_EQ(scaled_error(run(UnaryOp::softplus), {inf, 0, NAN, std::log(2.0), 1000, 0}, 1) < 1e-6, true);
  EXPECT_EQ(scaled_error(run(UnaryOp::log1p), {inf, NAN, NAN, 0, std::log1p(1000.0), NAN}, 1) < 1e-6, true);
  EXPECT_EQ(scaled_error(run(UnaryOp::expm1), {inf, -1, NAN, 0, inf, -1}), 0);
  EXPECT_EQ(scaled_error(run(UnaryOp::erf), {1, -1, NAN, 0, 1, -1}), 0);
  for (const UnaryOp op : {UnaryOp::floor, UnaryOp::round}) EXPECT_EQ(scaled_error(run(op), x.values()), 0);
  Buffer finite(kBool, {6});
  cpu::unary(UnaryOp::isfinite, x.view(), finite.view());
  EXPECT_EQ(finite.values(), (std::vector<double>{0, 0, 0, 1, 1, 1}));
  cpu::unary(UnaryOp::logical_not, x.view(), finite.view());
  EXPECT_EQ(finite.values(), (std::vector<double>{0, 0, 0, 1, 0, 0}));
}

TEST(Unary, RoundsHalvesToEven) {
  Buffer x(kF32, {8}), y(kF32, {8});
  const double in[] = {-2.5, -1.5, -0.75, -0.5, 0.5, 0.75, 1.5, 2.5};
  x.fill([&](int64_t i) { return in[i]; });
  cpu::unary(UnaryOp::round, x.view(), y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{-2, -2, -1, 0, 0, 1, 2, 2}));
  cpu::unary(UnaryOp::floor, x.view(), y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{-3, -2, -1, -1, 0, 0, 1, 2}));
}

// Relative to each value: log(1 + exp(x)) equals exp(x) to the last digits where that is small.
TEST(Unary, SoftplusIsExactWhereItIsSmall) {
  Buffer x(kF32, {17 * 5}), y(kF32, {17 * 5});
  x.fill([](int64_t i) { return -0.9 * static_cast<double>(i); });
  cpu::unary(UnaryOp::softplus, x.view(), y.view());
  for (int64_t i = 0; i < 17 * 5; ++i) EXPECT_NEAR(y.get(i) / std::log1p(std::exp(x.get(i))), 1, 4e-7) << x.get(i);
}

// Relative to each value: near 0 they equal x, where log(1 + x) and exp(x) - 1 would have lost it.
TEST(Unary, Log1pExpm1AndErfAreExactNearZero) {
  const struct {
    UnaryOp op;
    double (*f)(double);
    double most;
  } cases[] = {{UnaryOp::log1p, [](double x) { return std::log1p(x); }, 1e30},
               {UnaryOp::expm1, [](double x) { return std::expm1(x); }, 88},
               {UnaryOp::erf, [](double x) { return std::erf(x); }, 8}};
  for (const auto& c : cases) {
    std::vector<double> in;
    for (double x = 1e-30; x < c.most; x *= 1.37) {
      in.push_back(x);
      if (c.op != UnaryOp::log1p || x < 1) in.push_back(-x);
    }
    const auto n = static_cast<int64_t>(in.size());
    Buffer x(kF32, {n}), y(kF32, {n});
    x.fill([&](int64_t i) { return in[static_cast<size_t>(i)]; });
    cpu::unary(c.op, x.view(), y.view());
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(y.get(i) / c.f(x.get(i)), 1, 5e-7) << static_cast<int>(c.op) << ' ' << x.get(i);
  }
}

struct BinaryCase {
  BinaryOp op;
  double (*f)(double, double);
};
const BinaryCase kBinary[] = {
    {BinaryOp::add, [](double a, double b) { return a + b; }},
    {BinaryOp::sub, [](double a, double b) { return a - b; }},
    {BinaryOp::mul, [](double a, double b) { return a * b; }},
    {BinaryOp::minimum, [](double a, double b) { return std::min(a, b); }},
    {BinaryOp::maximum, [](double a, double b) { return std::max(a, b); }},
    {BinaryOp::eq, [](double a, double b) { return double(a == b); }},
    {BinaryOp::ne, [](double a, double b) { return double(a != b); }},
    {BinaryOp::lt, [](double a, double b) { return double(a < b); }},
    {BinaryOp::le, [](double a, double b) { return double(a <= b); }},
    {BinaryOp::gt, [](double a, double b) { return double(a > b); }},
    {BinaryOp::ge, [](double a, double b) { return double(a >= b); }},
    {BinaryOp::logical_and, [](double a, double b) { return double(a != 0 && b != 0); }},
    {BinaryOp::logical_or, [](double a, double b) { return double(a != 0 || b != 0); }},
    {BinaryOp::div, [](double a, double b) { return a / b; }},
    {BinaryOp::pow, [](double a, double b) { return std::pow(a, b); }},
};

TEST(Binary, BroadcastsOnEveryType) {
  const Shape shape{5, 6, 67};
  const std::pair<Shape, Shape> operands[] = {{{5, 6, 67}, {5, 6, 67}},
                                              {{5, 6, 67}, {67}},
                                              {{6, 1}, {5, 6, 67}},
                                              {{5, 1, 67}, {6, 1}},
                                              {{1}, {5, 6, 67}}};
  for (const DType dtype : {kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kI8}) {
    for (const BinaryCase& c : kBinary) {
      if ((c.op == BinaryOp::div || c.op == BinaryOp::pow) && !is_floating(dtype)) continue;
      for (const auto& [sa, sb] : operands) {
        Buffer a(dtype, sa), b(dtype, sb);
        a.random(1, 1, 5), b.random(2, 1, 5);
        const DType type = kernels::is_predicate(c.op) ? kBool : dtype;
        Buffer out(type, shape, {1, 0, 2});
        cpu::binary(c.op, a.expanded(shape), b.expanded(shape), out.view());
        std::vector<double> want;
        for (int64_t i = 0; i < shape.numel(); ++i) {
          auto pick = [&](const Buffer& v) {
            int64_t rest = i, at = 0, step = 1;
            for (int d = 0; d < v.view().rank(); ++d) {
              const int64_t size = v.view().shape[v.view().rank() - 1 - d], k = rest % shape[2 - d];
              rest /= shape[2 - d], at += (size == 1 ? 0 : k) * step, step *= size;
            }
            return v.get(at);
          };
          double w = c.f(pick(a), pick(b));
          if (dtype == kU8) w = static_cast<double>(static_cast<uint8_t>(static_cast<int64_t>(w)));
          want.push_back(w);
        }
        EXPECT_LE(scaled_error(out.values(), want), is_floating(dtype) ? tolerance(dtype) : 0)
            << static_cast<int>(c.op) << ' ' << name(dtype);
      }
    }
  }
}

TEST(Binary, ScalarsOnEitherSide) {
  Buffer x(kF32, {3, 50}), y(kF32, {3, 50});
  x.random(1, 0.5, 3);
  for (const BinaryCase& c : kBinary) {
    for (const bool left : {false, true}) {
      cpu::binary_scalar(c.op, x.view(), 2.0, left, y.view());
      std::vector<double> want = x.values();
      for (double& v : want) v = left ? c.f(2.0, v) : c.f(v, 2.0);
      EXPECT_LE(scaled_error(y.values(), want), 1e-6) << static_cast<int>(c.op) << left;
    }
  }
}

TEST(Binary, NanWinsMinimumAndMaximum) {
  Buffer a(kF32, {2}), b(kF32, {2}), out(kF32, {2});
  a.fill([](int64_t i) { return i ? NAN : 1; }), b.fill([](int64_t i) { return i ? 1 : NAN; });
  for (const BinaryOp op : {BinaryOp::minimum, BinaryOp::maximum}) {
    cpu::binary(op, a.view(), b.view(), out.view());
    EXPECT_TRUE(std::isnan(out.get(0)) && std::isnan(out.get(1)));
  }
}

TEST(Binary, InPlaceZeroSizeAndErrors) {
  Buffer a(kF32, {2000}), b(kF32, {2000});
  a.random(1), b.random(2);
  const std::vector<double> before = a.values();
  cpu::binary(BinaryOp::add, a.view(), b.view(), a.view());
  for (int64_t i = 0; i < 2000; ++i) EXPECT_EQ(a.get(i), static_cast<float>(before[i] + b.get(i)));
  Buffer none(kF32, {0, 3}), result(kF32, {0, 3});
  cpu::binary(BinaryOp::add, none.view(), none.view(), result.view());
  EXPECT_THROW(cpu::binary(BinaryOp::add, a.view(), none.view(), a.view()), ShapeError);
  Buffer i(kI32, {4});
  EXPECT_THROW(cpu::binary(BinaryOp::div, i.view(), i.view(), i.view()), DTypeError);
  EXPECT_THROW(cpu::unary(UnaryOp::exp, i.view(), i.view()), DTypeError);
}

TEST(Elementwise, ThreadsDoNotChangeBits) {
  Buffer x(kF32, {300, 1001}, {1, 0}), one(kF32, {300, 1001}), many(kF32, {300, 1001});
  x.random(5);
  RankContext context;
  for (auto [threads, out] : {std::pair<int, Buffer*>{1, &one}, {3, &many}}) {
    context.threads = threads;
    RankScope scope(context);
    cpu::unary(UnaryOp::gelu_tanh, x.view(), out->view());
  }
  EXPECT_EQ(one.memory(), many.memory());
}

TEST(Elementwise, WhereAndClamp) {
  Buffer c(kBool, {40, 30}), a(kBF16, {40, 30}), b(kBF16, {40, 30}), out(kBF16, {40, 30}, {1, 0});
  c.random(1, 0, 2), a.random(2), b.random(3);
  cpu::where(c.view(), a.view(), b.view(), out.view());
  for (int64_t i = 0; i < out.numel(); ++i)
    EXPECT_EQ(out.get(i), c.get(i) != 0 ? a.get(i) : b.get(i));
  cpu::clamp(a.view(), -0.5, 1, out.view());
  for (int64_t i = 0; i < out.numel(); ++i) EXPECT_EQ(out.get(i), std::clamp(a.get(i), -0.5, 1.0));
  Buffer n(kI32, {9});
  n.fill([](int64_t i) { return double(i) - 4; });
  cpu::clamp(n.view(), -1.5, INFINITY, n.view());
  EXPECT_EQ(n.values(), (std::vector<double>{-1, -1, -1, -1, 0, 1, 2, 3, 4}));
}

/// The derivative by central differences in f64.
double slope(const std::function<double(double)>& f, double x) {
  return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
}

TEST(Backward, MatchesNumericSlopes) {
  struct Case {
    const char* name;
    std::function<double(double)> f;
    BackwardOp op;
    bool takes_output;
  };
  const Case cases[] = {
      {"gelu_tanh", gelu_tanh, BackwardOp::gelu_tanh, false},
      {"gelu_exact", [](double x) { return x * phi(x); }, BackwardOp::gelu_exact, false},
      {"silu", [](double x) { return x * sigmoid(x); }, BackwardOp::silu, false},
      {"relu", [](double x) { return x > 0 ? x : 0; }, BackwardOp::relu, false},
      {"tanh", [](double x) { return std::tanh(x); }, BackwardOp::tanh, true},
      {"sigmoid", sigmoid, BackwardOp::sigmoid, true},
  };
  for (const Case& c : cases) {
    for (const DType dtype : {kF64, kF32, kBF16}) {
      Buffer x(kF64, {7, 150}), kept(dtype, {7, 150}), dy(dtype, {7, 150}, {1, 0}),
          dx(dtype, {7, 150});
      x.random(4, -4, 4), dy.random(5);
      kept.fill([&](int64_t i) { return c.takes_output ? c.f(x.get(i)) : x.get(i); });
      cpu::activation_backward(c.op, kept.view(), dy.view(), dx.view());
      std::vector<double> want;
      for (int64_t i = 0; i < x.numel(); ++i) {
        if (c.takes_output) {
          const double y = kept.get(i);
          want.push_back(dy.get(i) * (c.name[0] == 't' ? 1 - y * y : y * (1 - y)));
          if (dtype == kF64) {
            EXPECT_NEAR(want.back(), dy.get(i) * slope(c.f, x.get(i)), 1e-8);
          }
        } else {
          want.push_back(dy.get(i) * slope(c.f, kept.get(i)));
        }
      }
      EXPECT_LE(scaled_error(dx.values(), want), dtype == kF64 ? 1e-8 : 2 * tolerance(dtype))
          << c.name << name(dtype);
    }
  }
}

TEST(Backward, Swiglu) {
  for (const DType dtype : {kF64, kF32, kBF16}) {
    Buffer g(dtype, {40, 33}), u(dtype, {40, 33}), d(dtype, {40, 33}), y(dtype, {40, 33}),
        dg(dtype, {40, 33}), du(dtype, {40, 33});
    g.random(1, -5, 5), u.random(2), d.random(3);
    cpu::swiglu(g.view(), u.view(), y.view());
    cpu::swiglu_backward(g.view(), u.view(), d.view(), dg.view(), du.view());
    std::vector<double> wy, wg, wu;
    auto silu = [](double x) { return x * sigmoid(x); };
    for (int64_t i = 0; i < g.numel(); ++i) {
      wy.push_back(silu(g.get(i)) * u.get(i));
      wg.push_back(d.get(i) * u.get(i) * slope(silu, g.get(i)));
      wu.push_back(d.get(i) * silu(g.get(i)));
    }
    const double tol = dtype == kF64 ? 1e-8 : 2 * tolerance(dtype);
    EXPECT_LE(scaled_error(y.values(), wy), tol);
    EXPECT_LE(scaled_error(dg.values(), wg), tol);
    EXPECT_LE(scaled_error(du.values(), wu), tol);
  }
}

// Operands on both sides of the limits, and at them.
TEST(Backward, ClampedSwiglu) {
  for (const auto& [alpha, limit] : {std::pair(1.702, 7.0), {0.5, 2.0}, {1.0, double(INFINITY)}})
    for (const DType dtype : {kF64, kF32, kBF16, kF16}) {
      Buffer g(dtype, {40, 33}), u(dtype, {40, 33}, {1, 0}), d(dtype, {40, 33}), y(dtype, {40, 33}), dg(dtype, {40, 33}),
          du(dtype, {40, 33});
      const std::vector<double> gates = g.random(1, -9, 9).values(), ups = u.random(2, -9, 9).values();
      d.random(3);
      if (std::isfinite(limit)) {
        g.fill([&](int64_t i) { return i % 7 == 0 ? limit : gates[i]; });
        u.fill([&](int64_t i) { return i % 5 == 0 ? limit : i % 5 == 1 ? -limit : ups[i]; });
      }
      cpu::clamped_swiglu(g.view(), u.view(), alpha, limit, y.view());
      cpu::clamped_swiglu_backward(g.view(), u.view(), d.view(), alpha, limit, dg.view(), du.view());
      std::vector<double> wy, wg, wu;
      const auto h = [&](double x) { return x * sigmoid(alpha * x); };
      for (int64_t i = 0; i < g.numel(); ++i) {
        const double held = std::min(g.get(i), limit), up = std::clamp(u.get(i), -limit, limit);
        wy.push_back(h(held) * (up + 1));
        wg.push_back(g.get(i) <= limit ? d.get(i) * (up + 1) * slope(h, held) : 0);
        wu.push_back(up == u.get(i) ? d.get(i) * h(held) : 0);
      }
      const double tol = dtype == kF64 ? 1e-8 : 2 * tolerance(dtype);
      EXPECT_LE(scaled_error(y.values(), wy), tol) << name(dtype) << limit;
      EXPECT_LE(scaled_error(dg.values(), wg), tol) << name(dtype) << limit;
      EXPECT_LE(scaled_error(du.values(), wu), tol) << name(dtype) << limit;
      Buffer on_gate(dtype, {40, 33}), on_up(dtype, {40, 33});  // an output may be an operand
      on_gate.fill([&](int64_t i) { return g.get(i); }), on_up.fill([&](int64_t i) { return u.get(i); });
      cpu::clamped_swiglu(on_gate.view(), u.view(), alpha, limit, on_gate.view());
      cpu::clamped_swiglu(g.view(), on_up.view(), alpha, limit, on_up.view());
      EXPECT_EQ(on_gate.values(), y.values()) << name(dtype) << limit;
      EXPECT_EQ(on_up.values(), y.values()) << name(dtype) << limit;
    }
}

TEST(Backward, ClampedSwigluOfWhatIsNoNumber) {
  Buffer g(kF32, {4}), u(kF32, {4}), d(kF32, {4}), y(kF32, {4}), dg(kF32, {4}), du(kF32, {4});
  const double gates[] = {NAN, 2, INFINITY, 2}, ups[] = {2, NAN, 2, -INFINITY};
  g.fill([&](int64_t i) { return gates[i]; }), u.fill([&](int64_t i) { return ups[i]; });
  d.fill([](int64_t i) { return i < 2 ? 1 : INFINITY; });
  cpu::clamped_swiglu(g.view(), u.view(), 1, 4, y.view());
  EXPECT_TRUE(std::isnan(y.get(0)) && std::isnan(y.get(1)));
  EXPECT_NEAR(y.get(2), 4 * sigmoid(4) * 3, 1e-5);
  EXPECT_NEAR(y.get(3), 2 * sigmoid(2) * -3, 1e-5);
  // Like clamp: NaN stays NaN, and the gradient beyond the limits is 0 even where the output's gradient is infinite.
  cpu::clamped_swiglu_backward(g.view(), u.view(), d.view(), 1, 4, dg.view(), du.view());
  EXPECT_EQ(scaled_error(dg.values(), {0, NAN, 0, -INFINITY}), 0);
  EXPECT_EQ(scaled_error(du.values(), {NAN, 0, INFINITY, 0}), 0);
  Buffer whole(kI32, {4});
  EXPECT_THROW(cpu::clamped_swiglu(whole.view(), whole.view(), 1, 4, whole.view()), DTypeError);
  EXPECT_THROW(cpu::clamped_swiglu_backward(whole.view(), whole.view(), whole.view(), 1, 4, whole.view(), whole.view()), DTypeError);
}

}  // namespace
}  // namespace sheaf
