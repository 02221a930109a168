#include "sheaf/kernels/norm.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Operands {
  bool layer = true;
  Array x, dy;
  Array r = {}, dsum = {};  // optional: the norm of x + r, and another gradient of that sum
  Array weight, bias;       // optional
  bool has_weight = true, has_bias = true, has_dx = true;
  DType sums_dtype = kF32;
  double eps = 1e-5;
};
struct Results {
  Array sum, y, mean, rstd, dx, dweight, dbias;
};

Operands random(bool layer, DType d, const Shape& shape, Shape strides = {}) {
  const int64_t width = shape.back();
  return {.layer = layer,
          .x = Array::random(d, shape, 1, 1, strides),
          .dy = Array::random(d, shape, 2, 1, strides),
          .weight = Array::random(d, {width}, 3),
          .bias = Array::random(d, {width}, 4),
          .sums_dtype = d};
}

Results blank(const Operands& o, DType d, DType sums) {
  const View& x = o.x;
  const int64_t width = x.shape.back(), rows = width == 0 ? 0 : x.numel() / width;
  return {Array(d, x.shape, x.strides),    Array(d, x.shape, x.strides),
          Array(statistics_of(d), {rows}), Array(statistics_of(d), {rows}),
          Array(d, x.shape, x.strides),    Array(sums, Shape{width}),
          Array(sums, Shape{width})};
}

View optional(bool there, const View& v) { return there ? v : View{}; }

Results on_gpu(const Operands& o) {
  const Stream& s = OnGpu::stream();
  const Results r = blank(o, o.x.view().dtype, o.sums_dtype);
  const bool adds = o.r.bytes() > 0;
  const OnGpu x(o.x), dy(o.dy), addend(adds ? o.r : o.x), other_dx(adds ? o.dsum : o.dy),
      weight(o.weight), bias(o.bias), sum(r.sum), y(r.y), mean(r.mean), rstd(r.rstd), dx(r.dx),
      dweight(r.dweight), dbias(r.dbias);
  const View w = optional(o.has_weight, weight), b = optional(o.has_bias, bias),
             gradient = optional(o.has_dx, dx), dw = optional(o.has_weight, dweight),
             db = optional(o.has_bias, dbias);
  const View in = adds ? sum.view() : x.view(), dsum = optional(adds, other_dx);
  if (o.layer) {
    if (adds)
      cuda::add_layer_norm(s, x, addend, w, b, o.eps, sum, y, mean, rstd);
    else
      cuda::layer_norm(s, x, w, b, o.eps, y, mean, rstd);
    const GpuScratch scratch(cuda::layer_norm_backward_workspace(
        without_data(x), without_data(gradient), without_data(dw), without_data(db)));
    cuda::layer_norm_backward(s, dy, in, w, mean, rstd, gradient, dw, db, scratch, dsum);
  } else {
    if (adds)
      cuda::add_rms_norm(s, x, addend, w, o.eps, sum, y, rstd);
    else
      cuda::rms_norm(s, x, w, o.eps, y, rstd);
    const GpuScratch scratch(cuda::rms_norm_backward_workspace(
        without_data(x), without_data(gradient), without_data(dw)));
    cuda::rms_norm_backward(s, dy, in, w, rstd, gradient, dw, scratch, dsum);
  }
  return {sum.back(), y.back(), mean.back(), rstd.back(), dx.back(), dweight.back(), dbias.back()};
}

Results on_cpu_in_f64(const Operands& o) {
  const Array x = in_f64(o.x), dy = in_f64(o.dy), weight = in_f64(o.weight), bias = in_f64(o.bias);
  Operands dense = o;
  dense.x = x;
  const Results r = blank(dense, kF64, kF64);
  const View w = optional(o.has_weight, weight), b = optional(o.has_bias, bias);
  if (o.layer) {
    cpu::layer_norm(x, w, b, o.eps, r.y, r.mean, r.rstd);
    cpu::layer_norm_backward(
        dy, x, w, r.mean, r.rstd, r.dx, r.dweight, r.dbias,
        Scratch(cpu::layer_norm_backward_workspace(x, r.dx, r.dweight, r.dbias)));
  } else {
    cpu::rms_norm(x, w, o.eps, r.y, r.rstd);
    cpu::rms_norm_backward(dy, x, w, r.rstd, r.dx, r.dweight,
                           Scratch(cpu::rms_norm_backward_workspace(x, r.dx, r.dweight)));
  }
  return r;
}

void compare(const Operands& o) {
  const Results got = on_gpu(o), want = on_cpu_in_f64(o);
  const DType d = o.x.view().dtype;
  const double bound = 8 * epsilon(d), statistic = d == kF64 ? 1e-14 : 2e-6;
  const std::string where = std::string(o.layer ? "layer " : "rms ") + std::string(name(d)) +
                            o.x.view().shape.to_string();
  EXPECT_LT(scaled_error(got.y, values(want.y)), bound) << where;
  EXPECT_LT(scaled_error(got.rstd, values(want.rstd)), statistic) << where;
  if (o.layer) {
    for (int64_t r = 0; r < want.mean.view().numel(); ++r)  // of values around 1
      EXPECT_NEAR(got.mean.at(r), want.mean.at(r), statistic) << where;
  }
  if (o.x.view().shape.back() == 1) return;  // gradients of rows of one element are zero but for rounding
  if (o.has_dx) {
    EXPECT_LT(scaled_error(got.dx, values(want.dx)), 2 * bound) << where;
  }
  if (o.has_weight) {
    EXPECT_LT(scaled_error(got.dweight, values(want.dweight)), bound) << where;
  }
  if (o.layer && o.has_bias) {
    EXPECT_LT(scaled_error(got.dbias, values(want.dbias)), bound) << where;
  }
}

// Rows of a warp, of a block, of several pieces per thread, too wide for registers, and of 48 KiB.
const Shape kShapes[] = {{5, 7},     {2, 3, 64}, {1100, 33}, {1, 768},  {65, 1},   {100},
                         {300, 257}, {37, 1000}, {9, 2052},  {3, 4104}, {2, 8200}, {3, 1500}, {2, 12288}};

TEST(CudaNorm, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Shape& shape : kShapes)
      for (bool layer : {true, false}) compare(random(layer, d, shape));
}

TEST(CudaNorm, OptionalOperands) {
  SHEAF_NEEDS_GPU();
  for (const Shape& shape : {Shape{40, 96}, Shape{6, 1000}, Shape{2, 9000}})
    for (int which = 0; which < 8; ++which)
      for (bool layer : {true, false}) {
        Operands o = random(layer, kBF16, shape);
        o.has_weight = which & 1, o.has_bias = which & 2, o.has_dx = which & 4;
        o.sums_dtype = kF32;
        compare(o);
      }
}

TEST(CudaNorm, RowsTooLongForSharedMemory) {
  SHEAF_NEEDS_GPU();
  compare(random(true, kF32, {2, 60000}));
  compare(random(false, kF32, {2, 60000}));
}

// The norm of x + r has the bits of the norm of the sum, and so do the gradients of weight and bias; the sum's gradient includes dsum.
void compare_to_add_and_norm(bool layer, DType d, const Shape& shape, const Shape& strides = {}) {
  Operands o = random(layer, d, shape, strides);
  o.r = Array::random(d, shape, 5, 1, strides), o.dsum = Array::random(d, shape, 6, 1, strides);
  const Results got = on_gpu(o);
  const std::string where = std::string(name(d)) + shape.to_string();
  const Array total = added(o.x, o.r, d);
  EXPECT_TRUE(same_bits(got.sum, total)) << where;
  const Array untouched(d, shape, strides);
  EXPECT_TRUE(gaps_kept(untouched, got.sum) && gaps_kept(untouched, got.dx)) << where;
  Operands apart = random(layer, d, shape);
  apart.x = total;
  const Results want = on_gpu(apart);
  EXPECT_TRUE(same_bits(got.y, want.y) && same_bits(got.rstd, want.rstd)) << where;
  EXPECT_TRUE(same_bits(got.dweight, want.dweight)) << where;
  if (layer) {
    EXPECT_TRUE(same_bits(got.mean, want.mean) && same_bits(got.dbias, want.dbias)) << where;
  }
  const Results exact = on_cpu_in_f64(apart);
  EXPECT_LT(scaled_error(got.dx, values(added(exact.dx, o.dsum, kF64))), 8 * epsilon(d)) << where;
  if (statistics_of(d) == d) {  // wide elements: like an addition after the norm's backward
    EXPECT_TRUE(same_bits(got.dx, added(want.dx, o.dsum, d))) << where;
  }
}

TEST(CudaNorm, AddsOnTheWay) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Shape& shape : kShapes)
      for (bool layer : {true, false})
        if (shape.back() > 1) compare_to_add_and_norm(layer, d, shape);
  compare_to_add_and_norm(true, kF32, {2, 60000});  // too long for shared memory
  compare_to_add_and_norm(false, kBF16, {2, 50, 100}, {60 * 117, 117, 1});
}

TEST(CudaNorm, StridesAndOtherRowsChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t width : {100, 1600}) {
      const Shape shape{2, 50, width};
      const Results dense = on_gpu(random(true, d, shape)), again = on_gpu(random(true, d, shape));
      for (int64_t gap : {16, 17}) {  // rows aligned to 16 bytes, and not
        const Operands o = random(true, d, shape, {60 * (width + gap), width + gap, 1});
        const Results r = on_gpu(o);
        EXPECT_TRUE(same_bits(r.y, dense.y) && same_bits(r.dx, dense.dx)) << name(d) << width;
        EXPECT_TRUE(same_bits(r.dweight, dense.dweight) && same_bits(r.dbias, dense.dbias));
        const Array untouched(d, shape, o.x.view().strides);
        EXPECT_TRUE(gaps_kept(untouched, r.y) && gaps_kept(untouched, r.dx));
      }
      EXPECT_TRUE(same_bits(again.y, dense.y) && same_bits(again.dx, dense.dx) &&
                  same_bits(again.dweight, dense.dweight) && same_bits(again.dbias, dense.dbias));
      // Row 73 alone.
      Operands one = random(true, d, {1, 1, width});
      const Operands all = random(true, d, shape);
      View y = dense.y, dx = dense.dx;
      for (View* v : {&y, &dx}) v->data = v->as<char>() + 73 * width * size_of(d);
      y.shape = dx.shape = {1, 1, width};
      for (int64_t i = 0; i < width; ++i)
        one.x.set(i, all.x.at(73 * width + i)), one.dy.set(i, all.dy.at(73 * width + i));
      const Results alone = on_gpu(one);
      EXPECT_TRUE(same_bits(alone.y, y) && same_bits(alone.dx, dx));
    }
}

TEST(CudaNorm, NoRows) {
  SHEAF_NEEDS_GPU();
  const Results got = on_gpu(random(true, kF32, {0, 8}));
  EXPECT_EQ(values(got.dweight), std::vector<double>(8, 0.0));
  EXPECT_EQ(values(got.dbias), std::vector<double>(8, 0.0));
  on_gpu(random(true, kF32, {3, 0}));
}

TEST(CudaNorm, OffsetsDoNotSpoilTheVariance) {
  SHEAF_NEEDS_GPU();
  Operands o = random(true, kF32, {1, 4});
  o.x = Array::of(kF32, {1, 4}, {10000, 10001, 10002, 10003}), o.has_weight = o.has_bias = false;
  EXPECT_NEAR(on_gpu(o).y.at(0), -1.5 / std::sqrt(1.25 + 1e-5), 1e-3);
}

TEST(CudaNorm, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {2, 8}), w(kF32, {7}), stat(kF32, {2});
  EXPECT_THROW(cuda::rms_norm(OnGpu::stream(), x, w, 1e-5, x, stat), ShapeError);
  EXPECT_THROW(cuda::layer_norm_backward(OnGpu::stream(), x, x, View{}, stat, stat, x, View{},
                                         Array(kF32, {8}), Workspace{}),
               ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
