#include "sheaf/kernels/reduce.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/tests/kernels/views.h"

namespace sheaf {
namespace {
namespace cpu = kernels::cpu;
using test::Buffer;
using test::scaled_error;
using test::tolerance;

/// The values of each output's elements, in row-major order.
std::vector<std::vector<double>> lines(const Buffer& x, const Shape& out) {
  std::vector<std::vector<double>> result(static_cast<size_t>(out.numel()));
  const Shape& shape = x.view().shape;
  for (int64_t i = 0; i < x.numel(); ++i) {
    int64_t rest = i, at = 0, step = 1;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      const int64_t k = rest % shape[d];
      rest /= shape[d];
      if (out[d] != 1) at += k * step;
      step *= out[d];
    }
    result[static_cast<size_t>(at)].push_back(x.get(i));
  }
  return result;
}
template <class F>
std::vector<double> reference(const Buffer& x, const Shape& out, F f) {
  std::vector<double> want;
  for (const auto& line : lines(x, out)) want.push_back(f(line));
  return want;
}
double total(const std::vector<double>& v) {
  double s = 0;
  for (const double x : v) s += x;
  return s;
}

const Shape kShape{6, 35, 70};
const Shape kOut[] = {{6, 35, 1}, {1, 35, 70}, {6, 1, 70}, {1, 1, 70},
                      {6, 1, 1},  {1, 35, 1},  {1, 1, 1},  {6, 35, 70}};
const std::vector<int> kOrders[] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};

TEST(Reduce, AgreesWithF64OverAnyDimensionsAndLayout) {
  for (const DType dtype : {kF64, kF32, kBF16, kF16}) {
    for (const Shape& out : kOut) {
      for (const auto& order : kOrders) {
        Buffer x(dtype, kShape, order), y(dtype, out, order);
        x.random(3);
        const double tol = tolerance(dtype);
        cpu::sum(x.view(), y.view(), 0.125);
        EXPECT_LE(scaled_error(y.values(), reference(x, out, [](auto& v) { return total(v) / 8; })),
                  3 * tol);
        cpu::max(x.view(), y.view());
        EXPECT_EQ(y.values(),
                  reference(x, out, [](auto& v) { return *std::max_element(v.begin(), v.end()); }));
        cpu::min(x.view(), y.view());
        EXPECT_EQ(y.values(),
                  reference(x, out, [](auto& v) { return *std::min_element(v.begin(), v.end()); }));
        cpu::logsumexp(x.view(), y.view());
        EXPECT_LE(scaled_error(y.values(), reference(x, out,
                                                     [](auto& v) {
                                                       double s = 0;
                                                       for (const double e : v) s += std::exp(e);
                                                       return std::log(s);
                                                     })),
                  tol);
        cpu::var(x.view(), 0, y.view());
        EXPECT_LE(scaled_error(y.values(), reference(x, out,
                                                     [](auto& v) {
                                                       const double m = total(v) / double(v.size());
                                                       double s = 0;
                                                       for (const double e : v)
                                                         s += (e - m) * (e - m);
                                                       return s / double(v.size());
                                                     })),
                  2 * tol);
      }
    }
  }
}

TEST(Reduce, BitsDependOnTheReducedLengthAlone) {
  // Long enough for several blocks and groups; every layout, thread count and number of outputs
  // gives the same bits.
  const int64_t length = 70 * 1024 + 13;
  Buffer row(kF32, {1, length});
  row.random(9);
  Buffer want(kF32, {1, 1});
  cpu::sum(row.view(), want.view());
  RankContext context;
  for (const int threads : {1, 2, 3}) {
    context.threads = threads;
    RankScope scope(context);
    for (const int64_t outputs : {1, 3, 40}) {
      for (const auto& order : {std::vector<int>{0, 1}, std::vector<int>{1, 0}}) {
        Buffer x(kF32, {outputs, length}, order), y(kF32, {outputs, 1});
        x.fill([&](int64_t i) { return row.get(i % length); });
        cpu::sum(x.view(), y.view());
        for (int64_t i = 0; i < outputs; ++i)
          EXPECT_EQ(y.get(i), want.get(0)) << threads << ' ' << outputs << ' ' << order[0];
      }
    }
  }
}

TEST(Reduce, LongSumsStayAccurate) {
  Buffer x(kF32, {1 << 20}), y(kF32, {1});
  x.fill([](int64_t) { return 0.1f; });
  cpu::sum(x.view(), y.view());
  EXPECT_NEAR(y.get(0), (1 << 20) * static_cast<double>(0.1f), 0.1);
}

TEST(Reduce, IntegersAndBool) {
  Buffer x(kU8, {50, 9}), y(kI64, {1, 9}), mask(kBool, {3000}), count(kI64, {1});
  x.fill([](int64_t) { return 255.0; });
  cpu::sum(x.view(), y.view());
  EXPECT_EQ(y.values(), std::vector<double>(9, 12750));
  mask.fill([](int64_t i) { return double(i % 3 == 0); });
  cpu::sum(mask.view(), count.view());
  EXPECT_EQ(count.get(0), 1000);
  Buffer n(kI32, {4}), top(kI32, {1});
  n.fill([](int64_t i) { return -5.0 - double(i); });
  cpu::max(n.view(), top.view());
  EXPECT_EQ(top.get(0), -5);
}

TEST(Reduce, EmptyAndSpecialValues) {
  Buffer none(kF32, {3, 0}), y(kF32, {3, 1}), no_rows(kF32, {0, 4}), nothing(kF32, {0, 1}),
      sums(kF32, {1, 4});
  cpu::sum(none.view(), y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{0, 0, 0}));
  cpu::max(none.view(), y.view());
  EXPECT_EQ(y.get(0), -INFINITY);
  cpu::logsumexp(none.view(), y.view());
  EXPECT_EQ(y.get(0), -INFINITY);
  cpu::sum(no_rows.view(), nothing.view());
  cpu::sum(no_rows.view(), sums.view());
  EXPECT_EQ(sums.values(), std::vector<double>(4, 0.0));
  Buffer x(kF32, {3, 40}), z(kF32, {3, 1});
  x.fill([](int64_t i) { return i < 40 ? -INFINITY : i == 77 ? INFINITY : i == 90 ? NAN : 1000; });
  cpu::logsumexp(x.view(), z.view());
  EXPECT_TRUE(z.get(0) == -INFINITY && z.get(1) == INFINITY && std::isnan(z.get(2)));
  cpu::max(x.view(), z.view());
  EXPECT_TRUE(z.get(0) == -INFINITY && z.get(1) == INFINITY && std::isnan(z.get(2)));
}

TEST(Reduce, VarianceFarFromZero) {
  // The mean, 1e6 + 1/3, is no f32: the passes must compensate for the rounded centre.
  Buffer x(kF32, {3072}), y(kF32, {1});
  x.fill([](int64_t i) { return 1e6 + double(i % 3 == 0); });
  cpu::var(x.view(), 0, y.view());
  EXPECT_NEAR(y.get(0), 2.0 / 9, 1e-6);
  cpu::var(x.view(), 1, y.view());
  EXPECT_NEAR(y.get(0), 2.0 / 9 * 3072 / 3071, 1e-6);
}

TEST(Argmax, FirstOfEqualsAndNan) {
  Buffer x(kF32, {3, 5}), y(kI64, {3, 1}), columns(kI64, {1, 5});
  const double in[] = {1, 7, 7, 0, 2, 5, 4, NAN, 9, NAN, -3, -2, -1, -1, -4};
  x.fill([&](int64_t i) { return in[i]; });
  cpu::argmax(x.view(), 1, y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{1, 2, 2}));
  cpu::argmax(x.view(), 0, columns.view());
  EXPECT_EQ(columns.values(), (std::vector<double>{1, 0, 1, 1, 1}));
  Buffer none(kF32, {3, 0});
  EXPECT_THROW(cpu::argmax(none.view(), 1, y.view()), ShapeError);
}

TEST(Sum, OfColumnsIsThatOfTheTransposesRows) {
  for (const DType dtype : {kF32, kBF16}) {
    Buffer x(dtype, {2500, 130}), t(dtype, {130, 2500}), y(dtype, {1, 130}), z(dtype, {130, 1});
    x.random(2);
    t.fill([&](int64_t i) { return x.get(i % 2500 * 130 + i / 2500); });
    cpu::sum(x.view(), y.view());
    cpu::sum(t.view(), z.view());
    EXPECT_EQ(y.values(), z.values());
  }
}

}  // namespace
}  // namespace sheaf
