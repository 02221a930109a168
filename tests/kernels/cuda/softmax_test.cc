#include "sheaf/kernels/softmax.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Kind {
  const char* name;
  bool log;
  void forward(const View& x, const View& y) const {
    const Stream& s = OnGpu::stream();
    log ? cuda::log_softmax(s, x, y) : cuda::softmax(s, x, y);
  }
  void backward(const View& y, const View& dy, const View& dx) const {
    const Stream& s = OnGpu::stream();
    log ? cuda::log_softmax_backward(s, y, dy, dx) : cuda::softmax_backward(s, y, dy, dx);
  }
  void forward_on_cpu(const View& x, const View& y) const {
    log ? cpu::log_softmax(x, y) : cpu::softmax(x, y);
  }
  void backward_on_cpu(const View& y, const View& dy, const View& dx) const {
    log ? cpu::log_softmax_backward(y, dy, dx) : cpu::softmax_backward(y, dy, dx);
  }
};
const Kind kKinds[] = {{"softmax", false}, {"log_softmax", true}};

Array forward(const Kind& kind, const Array& x, Shape strides = {}) {
  const Array blank(x.view().dtype, x.view().shape, strides);
  const OnGpu gx(x), gy(blank);
  kind.forward(gx, gy);
  const Array y = gy.back();
  EXPECT_TRUE(gaps_kept(blank, y)) << kind.name << x.view().shape.to_string();
  return y;
}
Array backward(const Kind& kind, const Array& y, const Array& dy, Shape strides = {}) {
  const Array blank(y.view().dtype, y.view().shape, strides);
  const OnGpu gy(y), gdy(dy), gdx(blank);
  kind.backward(gy, gdy, gdx);
  const Array dx = gdx.back();
  EXPECT_TRUE(gaps_kept(blank, dx)) << kind.name << y.view().shape.to_string();
  return dx;
}

void check(DType d, const Shape& shape, Shape strides = {}) {
  const Array x = Array::random(d, shape, 1, 3, strides), dy = Array::random(d, shape, 2, 1);
  for (const Kind& kind : kKinds) {
    const Array want(kF64, shape), want_dx(kF64, shape);
    const Array y = forward(kind, x, strides);
    kind.forward_on_cpu(in_f64(x), want);
    // A GPU's exponential may be off by two units in the last place, and so may every term of a
    // sum.
    EXPECT_LT(scaled_error(y, values(want)), 4 * epsilon(d))
        << kind.name << name(d) << shape.to_string();
    // From the rounded output, which is what the backward reads.
    kind.backward_on_cpu(in_f64(y), in_f64(dy), want_dx);
    const Array dx = backward(kind, y, dy, strides);
    // The terms of the gradient may cancel: errors are relative to their magnitude.
    double largest = 1e-30, worst = 0;
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const double p = kind.log ? std::exp(y.at(i)) : y.at(i), g = std::fabs(dy.at(i));
      largest = std::max(largest, kind.log ? g + p * std::sqrt(shape.back()) : p * g);
      const double difference = std::fabs(dx.at(i) - want_dx.at(i));
      worst = std::max(worst, std::isfinite(difference) ? difference : INFINITY);
    }
    EXPECT_LT(worst, 8 * epsilon(d) * largest) << kind.name << name(d) << shape.to_string();
  }
}

TEST(CudaSoftmax, AgreesWithTheCpuAtAnyWidth) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64}) {
    // Around the limits of packs, teams of lanes, warps and blocks.
    for (int64_t width : {1,   2,   3,   4,   5,   7,   8,   9,    16,   17,   31,   33,   64,
                          100, 127, 128, 129, 255, 256, 257, 1000, 1024, 1025, 2048, 2049, 4097})
      check(d, {width < 100 ? 70 : 3, width});
    check(d, {5});
    check(d, {2, 3, 4, 40}), check(d, {0, 4}), check(d, {4, 0});
  }
}

TEST(CudaSoftmax, RowsBeyondTheRegistersOfABlock) {
  SHEAF_NEEDS_GPU();
  // The widest row that a block holds, and one more: the limits of forward and backward differ by a
  // factor of two.
  for (int64_t width : {16384, 16385, 32768, 32769, 40001}) check(kF32, {2, width});
  for (int64_t width : {32768, 32769, 65536, 65537, 70003}) check(kBF16, {1, width});
  check(kF16, {1, 65600}), check(kF64, {1, 16390});
}

TEST(CudaSoftmax, StridesGapsAndNeighboursChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t width : {24, 1001, 4100, 33000}) {
      check(d, {3, 2, width}, {width + 3, 3 * (width + 3), 1});  // no row but the first is aligned
      check(d, {3, 2, width}, {2 * (width + 8), width + 8, 1});
      for (const Kind& kind : kKinds) {
        const Shape shape{3, 2, width};
        const Array dense = Array::random(d, shape, 1),
                    other = Array::random(d, shape, 1, 1, {width + 3, 3 * (width + 3), 1}),
                    dy = Array::random(d, shape, 2);
        const Array y = forward(kind, dense);
        EXPECT_TRUE(same_bits(y, forward(kind, other, other.view().strides))) << width;
        EXPECT_TRUE(same_bits(y, forward(kind, dense))) << width;
        Array first(d, {1, width});
        first.fill([&](int64_t i) { return dense.at(i); });
        View row = y.view();
        row.shape = {1, width}, row.strides = {width, 1};
        EXPECT_TRUE(same_bits(row, forward(kind, first))) << width;
        EXPECT_TRUE(same_bits(backward(kind, y, dy),
                              backward(kind, y, dy, {width + 3, 3 * (width + 3), 1})))
            << width;
      }
    }
}

TEST(CudaSoftmax, InPlace) {
  SHEAF_NEEDS_GPU();
  for (int64_t width : {5, 300, 5000, 40000}) {
    const Array x = Array::random(kF32, {4, width}, 1), dy = Array::random(kF32, {4, width}, 2);
    for (const Kind& kind : kKinds) {
      const Array y = forward(kind, x);
      const OnGpu gx(x), gdy(dy), gy(y);
      kind.forward(gx, gx);
      EXPECT_TRUE(same_bits(gx.back(), y)) << kind.name << width;
      kind.backward(gy, gdy, gdy);
      EXPECT_TRUE(same_bits(gdy.back(), backward(kind, y, dy))) << kind.name << width;
    }
  }
}

TEST(CudaSoftmax, InfinitiesAndNanAsOnTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t width : {4, 100, 5000, 70000})
      for (const Kind& kind : kKinds) {
        Array x = Array::random(d, {7, width}, 1);
        for (int64_t i = 0; i < width; ++i) x.set(i, -INFINITY);      // nothing to choose from
        x.set(width + 1, -INFINITY), x.set(2 * width + 2, INFINITY);  // masked; overflowed
        x.set(3 * width + width - 1, NAN), x.set(4 * width, 1000);
        for (int64_t row : {5, 6})  // all but the first masked, and all but one and a NaN
          for (int64_t i = 1; i < width; ++i) x.set(row * width + i, -INFINITY);
        x.set(6 * width + width / 2, NAN);
        const Array y = forward(kind, x), want(kF64, {7, width});
        kind.forward_on_cpu(in_f64(x), want);
        int wrong = 0;
        for (int64_t i = 0; i < 7 * width; ++i) {
          const double a = y.at(i), b = want.at(i);
          wrong += std::isnan(b) ? !std::isnan(a)
                   : std::isinf(b)
                       ? a != b
                       : !(std::fabs(a - b) <= 4 * epsilon(d) * std::max(1.0, std::fabs(b)));
        }
        EXPECT_EQ(wrong, 0) << kind.name << name(d) << width;
      }
}

TEST(CudaSoftmax, RefusesOtherShapesAndTypes) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {3, 4}), other(kF32, {4, 3}), narrow(kBF16, {3, 4}),
      columns(kF32, {3, 4}, {1, 3}), whole(kI32, {3, 4});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::softmax(s, x, other), ShapeError);
  EXPECT_THROW(cuda::softmax(s, x, narrow), DTypeError);
  EXPECT_THROW(cuda::softmax(s, columns, x), ShapeError);
  EXPECT_THROW(cuda::softmax(s, whole, whole), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
