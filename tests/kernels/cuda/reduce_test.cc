#include "sheaf/kernels/reduce.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

enum class Op { sum, max, min, logsumexp, var, argmax };
constexpr Op kOps[] = {Op::sum, Op::max, Op::min, Op::logsumexp, Op::var};
constexpr double kScale = 0.125, kCorrection = 0.5;

int dim_of(const Shape& x, const Shape& out) {
  int one = 0;
  for (int d = 0; d < x.rank(); ++d) {
    if (x[d] != out[d]) return d;
    if (out[d] == 1) one = d;
  }
  return one;
}

void on_gpu(Op op, const View& x, const View& out) {
  const Stream& s = OnGpu::stream();
  const View mx = without_data(x), mout = without_data(out);
  const int dim = dim_of(x.shape, out.shape);
  switch (op) {
    case Op::sum:
      return cuda::sum(s, x, out, is_floating(x.dtype) ? kScale : 1.0,
                       GpuScratch(cuda::sum_workspace(mx, mout)));
    case Op::max:
      return cuda::max(s, x, out, GpuScratch(cuda::max_workspace(mx, mout)));
    case Op::min:
      return cuda::min(s, x, out, GpuScratch(cuda::min_workspace(mx, mout)));
    case Op::logsumexp:
      return cuda::logsumexp(s, x, out, GpuScratch(cuda::logsumexp_workspace(mx, mout)));
    case Op::var:
      return cuda::var(s, x, kCorrection, out,
                       GpuScratch(cuda::var_workspace(mx, kCorrection, mout)));
    case Op::argmax:
      return cuda::argmax(s, x, dim, out, GpuScratch(cuda::argmax_workspace(mx, dim, mout)));
  }
}
void on_cpu(Op op, const View& x, const View& out) {
  switch (op) {
    case Op::sum:
      return cpu::sum(x, out, is_floating(x.dtype) ? kScale : 1.0);
    case Op::max:
      return cpu::max(x, out);
    case Op::min:
      return cpu::min(x, out);
    case Op::logsumexp:
      return cpu::logsumexp(x, out);
    case Op::var:
      return cpu::var(x, kCorrection, out);
    case Op::argmax:
      return cpu::argmax(x, dim_of(x.shape, out.shape), out);
  }
}

Array run(Op op, const Array& x, const Shape& out, Shape strides = {}) {
  const Array blank(op == Op::argmax ? kI64 : x.view().dtype, out, strides);
  const OnGpu gx(x), gy(blank);
  on_gpu(op, gx, gy);
  const Array y = gy.back();
  EXPECT_TRUE(gaps_kept(blank, y)) << x.view().shape.to_string();
  return y;
}

void check(Op op, const Array& x, const Shape& out, Shape strides = {}) {
  const DType d = x.view().dtype;
  const Array y = run(op, x, out, strides), want(op == Op::argmax ? kI64 : kF64, out);
  on_cpu(op, in_f64(x), want);
  const std::string what = std::string(name(d)) + " op " + std::to_string(static_cast<int>(op)) +
                           ' ' + x.view().shape.to_string() + " strides " +
                           x.view().strides.to_string() + " to " + out.to_string();
  if (op == Op::argmax || op == Op::max || op == Op::min) {
    EXPECT_EQ(values(y), values(want)) << what;
  } else if (op == Op::sum) {
    // Sums of both signs, relative to the magnitude of the addends.
    const double each = std::sqrt(static_cast<double>(x.view().numel()) /
                                  static_cast<double>(std::max<int64_t>(1, out.numel())));
    double worst = 0;
    for (int64_t i = 0; i < out.numel(); ++i)
      worst = std::max(worst, std::fabs(y.at(i) - want.at(i)));
    EXPECT_LT(worst, 4 * epsilon(d) * kScale * each) << what;
  } else {
    EXPECT_LT(scaled_error(y, values(want)), 4 * epsilon(d)) << what;
  }
}

/// Strides of a dense array with its dimensions in memory in `order`, the last one innermost.
Shape in_order(const Shape& shape, std::vector<int> order, int64_t gap = 0) {
  Shape strides = Shape::filled(shape.rank(), 1);
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;)
    strides[order[i]] = step, step = step * shape[order[i]] + gap;
  return strides;
}

TEST(CudaReduce, AnyDimensionsAndLayout) {
  SHEAF_NEEDS_GPU();
  const Shape shape{6, 35, 72};
  const Shape outs[] = {{6, 35, 1}, {1, 35, 72}, {6, 1, 72}, {1, 1, 72},
                        {6, 1, 1},  {1, 35, 1},  {1, 1, 1},  {6, 35, 72}};
  const std::vector<int> orders[] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Shape& out : outs)
      for (const auto& order : orders)
        for (int64_t gap : {0, 3, 8}) {
          const Array x = Array::random(d, shape, 3, 1, in_order(shape, order, gap));
          for (Op op : kOps)
            if (op != Op::var || !(out == shape)) check(op, x, out, in_order(out, order, gap));
        }
}

TEST(CudaReduce, RowsOfAnyLength) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF64})
    for (int64_t k : {1,   2,   3,   4,   5,   8,   9,    16,   17,   31,   32,   33,   64,
                      127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2048, 2049, 5000}) {
      const int64_t n = k < 100 ? 37 : 3;
      const Array rows = Array::random(d, {n, k}, 1), columns = Array::random(d, {k, n}, 2);
      for (Op op : kOps) {
        if (op == Op::var && k < 2) continue;
        check(op, rows, {n, 1}), check(op, columns, {1, n});
      }
      check(Op::argmax, rows, {n, 1}), check(Op::argmax, columns, {1, n});
    }
}

TEST(CudaReduce, LongRowsAndMoreChunksThanGroups) {
  SHEAF_NEEDS_GPU();
  for (Op op : kOps) {
    check(op, Array::random(kF32, {1, 70 * 1024 + 13}, 1), {1, 1});
    check(op, Array::random(kBF16, {70 * 1024 + 13, 9}, 1), {1, 9});
    if (op == Op::max || op == Op::min) continue;
    check(op, Array::random(kBF16, {1, 2050 * 1024 + 77}, 1), {1, 1});
    check(op, Array::random(kF32, {2049 * 1024 + 77, 8}, 1, 1, {9, 1}), {1, 8});
  }
  Array x = Array::random(kF32, {1, 2050 * 1024 + 77}, 1);
  check(Op::argmax, x, {1, 1});
  x.set(2000000, 9), x.set(1999000, 9), x.set(2050000, 9);  // the first of equals
  check(Op::argmax, x, {1, 1});
}

TEST(CudaReduce, BitsDependOnTheReducedLengthAlone) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t k : {3, 40, 70, 1000, 5003, 70 * 1024 + 13}) {
      const Array row = Array::random(d, {1, k}, 9);
      for (Op op : kOps) {
        const Array want = run(op, row, {1, 1});
        EXPECT_TRUE(same_bits(want, run(op, row, {1, 1}))) << k;
        for (int64_t outputs : {3, 40}) {
          if (outputs * k > 500000) continue;
          const Shape shape{outputs, k};
          for (const Shape& strides : {Shape{k, 1}, Shape{1, outputs}, Shape{k + 5, 1},
                                       Shape{1, outputs + 8}, Shape{2 * k, 2}}) {
            Array x(d, shape, strides);
            x.fill([&](int64_t i) { return row.at(i % k); });
            const Array y = run(op, x, {outputs, 1});
            for (int64_t i = 0; i < outputs; ++i)
              EXPECT_EQ(y.at(i), want.at(0))
                  << static_cast<int>(op) << ' ' << k << ' ' << outputs << strides.to_string();
          }
          // Two reduced dimensions that are not adjacent.
          if (k != 40) continue;
          Array x(d, {5, outputs, 8});
          x.fill([&](int64_t i) { return row.at(i / (outputs * 8) * 8 + i % 8); });
          const Array y = run(op, x, {1, outputs, 1});
          for (int64_t i = 0; i < outputs; ++i) EXPECT_EQ(y.at(i), want.at(0)) << outputs;
        }
      }
    }
}

TEST(CudaReduce, IntegersAndBool) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kU8, kI8, kI32, kI64, kBool, kU32})
    for (const Shape& out : {Shape{3000, 1}, Shape{1, 9}, Shape{1, 1}}) {
      Array x(d, {3000, 9});
      x.fill([&](int64_t i) {
        return d == kBool              ? i % 3 == 0
               : d == kI8 || d == kI32 ? i * 7919 % 101 - 50
                                       : i * 7919 % 101;
      });
      if (d == kI64) x.set(77, 9007199254740993.0 * 512);  // more than f64 holds
      for (Op op : {Op::sum, Op::max, Op::min}) {
        const Array blank(kI64, out), want(kI64, out);
        const OnGpu gx(x), gy(blank);
        on_gpu(op, gx, gy), on_cpu(op, x, want);
        EXPECT_TRUE(same_bits(gy.back(), want)) << name(d) << out.to_string();
      }
      if (out.numel() == 1) continue;
      const Array want(kI64, out);
      on_cpu(Op::argmax, x, want);
      EXPECT_TRUE(same_bits(run(Op::argmax, x, out), want)) << name(d) << out.to_string();
    }
}

bool equal_or_nan(const View& a, const View& b) {
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double x = Array::read(a, i), y = Array::read(b, i);
    if (std::isnan(x) != std::isnan(y)) return false;
    if (!std::isnan(x) && x != y && !(std::fabs(x - y) <= 1e-5 * std::fabs(y))) return false;
  }
  return true;
}

TEST(CudaReduce, EmptyAndSpecialValues) {
  SHEAF_NEEDS_GPU();
  for (const Shape& shape : {Shape{3, 0}, Shape{0, 20}, Shape{20, 0, 3}})
    for (Op op : kOps) {
      Shape out = shape;
      for (int d = 0; d < out.rank(); ++d)
        if (out[d] == 0) out[d] = 1;
      const Array x(kF32, shape), want(kF32, out);
      on_cpu(op, x, want);
      EXPECT_TRUE(equal_or_nan(run(op, x, out), want)) << static_cast<int>(op) << out.to_string();
      run(op, Array(kF32, {0, 7}), {0, 1});
    }
  const Array none(kI32, {3, 0}), extremes(kI32, {3, 1});
  on_cpu(Op::max, none, extremes);
  EXPECT_TRUE(same_bits(run(Op::max, none, {3, 1}), extremes));

  // Only -inf; an inf; an inf and a NaN; a NaN first, last and alone in its chunk; a -inf; chunks of -inf.
  for (int64_t k : {40, 3000}) {
    Array x = Array::random(kF32, {8, k}, 1);
    for (int64_t i = 0; i < k; ++i) x.set(i, -INFINITY);
    x.set(k + k / 2, INFINITY), x.set(2 * k + 1, INFINITY), x.set(2 * k + k - 1, NAN);
    x.set(3 * k, NAN), x.set(4 * k + k - 1, NAN), x.set(5 * k + k / 2, NAN);
    x.set(6 * k + 5, -INFINITY);
    for (int64_t i = 0; i < k; ++i)  // chunks of -inf alone before and behind another one
      if (i / 1024 != 1) x.set(7 * k + i, -INFINITY);
    Array columns(kF32, {k, 8});
    columns.fill([&](int64_t i) { return x.at(i % 8 * k + i / 8); });
    for (Op op : kOps) {
      const Array want(kF32, {8, 1});
      on_cpu(op, x, want);
      EXPECT_TRUE(equal_or_nan(run(op, x, {8, 1}), want)) << static_cast<int>(op) << ' ' << k;
      View row = want.view();
      row.shape = {1, 8}, row.strides = {8, 1};
      EXPECT_TRUE(equal_or_nan(run(op, columns, {1, 8}), row)) << static_cast<int>(op) << ' ' << k;
    }
    check(Op::argmax, x, {8, 1});
    x.set(3 * k + 1, NAN), x.set(3 * k + 7, NAN);
    check(Op::argmax, x, {8, 1});
    for (int64_t i = 0; i < k; ++i) x.set(i, 1);  // all equal
    check(Op::argmax, x, {8, 1});
  }
}

TEST(CudaReduce, AccurateWhereItIsHard) {
  SHEAF_NEEDS_GPU();
  Array x(kF32, {1, 1 << 20}), far(kF32, {1, 3072}), spread(kF32, {1, 3000});
  x.fill([](int64_t) { return 0.1f; });
  EXPECT_NEAR(run(Op::sum, x, {1, 1}).at(0), kScale * (1 << 20) * double{0.1f}, 0.01);
  far.fill([](int64_t i) { return 1e6 + double(i % 3 == 0); });  // the mean is no f32
  check(Op::var, far, {1, 1});
  spread.fill([](int64_t i) { return i < 1024 ? 1000 : i == 2000 ? 1001 : -1000; });
  check(Op::logsumexp, spread, {1, 1});
}

TEST(CudaReduce, TheSumOfColumnsIsThatOfTheTransposesRows) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) {
    const Array x = Array::random(d, {2500, 130}, 2), out(d, {1, 130}), want(d, {130, 1});
    Array t(d, {130, 2500});
    t.fill([&](int64_t i) { return x.at(i % 2500 * 130 + i / 2500); });
    const OnGpu gx(x), gout(out), gt(t), gwant(want);
    cuda::sum(OnGpu::stream(), gx, gout, 1.0, GpuScratch(cuda::sum_workspace(x, out)));
    cuda::sum(OnGpu::stream(), gt, gwant, 1.0, GpuScratch(cuda::sum_workspace(t, want)));
    EXPECT_EQ(values(gout.back()), values(gwant.back())) << name(d);
  }
}

TEST(CudaReduce, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  const Stream& s = OnGpu::stream();
  const Array x(kF32, {3, 2000}), y(kF32, {3, 1}), other(kF32, {3, 2}), whole(kI32, {3, 1}),
      none(kF32, {3, 0}), at(kI64, {3, 1});
  EXPECT_THROW(cuda::sum(s, x, other, 1.0, {}), ShapeError);
  EXPECT_THROW(cuda::sum(s, x, y, 1.0, {}), ShapeError);  // no workspace
  EXPECT_THROW(cuda::sum(s, whole, whole, 2.0, {}), DTypeError);
  EXPECT_THROW(cuda::var(s, whole, 1, whole, {}), DTypeError);
  EXPECT_THROW(cuda::logsumexp(s, whole, whole, {}), DTypeError);
  EXPECT_THROW(cuda::argmax(s, none, 1, at, {}), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
