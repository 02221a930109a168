#include "sheaf/kernels/norm.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

struct Arrays {
  Array y, mean, rstd, dx, dw, db;
};

Arrays run(bool layer, const View& x, const View& w, const View& b, const View& dy) {
  const DType stat = x.dtype == kF64 ? kF64 : kF32;
  const int64_t width = x.shape.back(), rows = x.numel() / std::max<int64_t>(width, 1);
  Arrays a{Array(x.dtype, x.shape), Array(stat, {rows}),     Array(stat, {rows}),
           Array(x.dtype, x.shape), Array(x.dtype, {width}), Array(x.dtype, {width})};
  if (layer) {
    layer_norm(x, w, b, 1e-5, a.y, a.mean, a.rstd);
    layer_norm_backward(dy, x, w, a.mean, a.rstd, a.dx, a.dw, a.db,
                        Scratch(layer_norm_backward_workspace(without_data(x), a.dx, a.dw, a.db)));
  } else {
    rms_norm(x, w, 1e-5, a.y, a.rstd);
    rms_norm_backward(dy, x, w, a.rstd, a.dx, a.dw,
                      Scratch(rms_norm_backward_workspace(without_data(x), a.dx, a.dw)));
  }
  return a;
}

TEST(Norm, MatchesTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Shape& shape :
         {Shape{5, 7}, Shape{2, 3, 64}, Shape{130, 33}, Shape{1, 768}, Shape{65, 1}, Shape{100}})
      for (int variant = 0; variant < 6; ++variant) {
        const bool layer = variant < 4, has_weight = variant % 2, has_bias = layer && variant >= 2;
        const Array x = Array::random(d, shape, 1), dy = Array::random(d, shape, 2);
        const int64_t width = shape.back(), rows = shape.numel() / width;
        const Array w = has_weight ? Array::random(d, {width}, 3) : Array(),
                    b = has_bias ? Array::random(d, {width}, 4) : Array();
        std::vector<double> y(shape.numel()), dx(shape.numel()), dw(width), db(width);
        for (int64_t r = 0; r < rows; ++r) {
          double mean = 0, square = 0, g_mean = 0, gx_mean = 0;
          for (int64_t i = 0; layer && i < width; ++i) mean += x.at(r * width + i) / width;
          for (int64_t i = 0; i < width; ++i)
            square += std::pow(x.at(r * width + i) - mean, 2) / width;
          const double rstd = 1 / std::sqrt(square + 1e-5);
          auto xhat = [&](int64_t i) { return (x.at(r * width + i) - mean) * rstd; };
          auto g = [&](int64_t i) { return dy.at(r * width + i) * (has_weight ? w.at(i) : 1); };
          for (int64_t i = 0; i < width; ++i) {
            y[r * width + i] = xhat(i) * (has_weight ? w.at(i) : 1) + (has_bias ? b.at(i) : 0);
            dw[i] += dy.at(r * width + i) * xhat(i), db[i] += dy.at(r * width + i);
            g_mean += g(i) / width, gx_mean += g(i) * xhat(i) / width;
          }
          for (int64_t i = 0; i < width; ++i)
            dx[r * width + i] = rstd * (g(i) - (layer ? g_mean : 0) - xhat(i) * gx_mean);
        }
        const Arrays got =
            run(layer, x, has_weight ? w.view() : View{}, has_bias ? b.view() : View{}, dy);
        const double bound = 6 * epsilon(d);
        const std::string where =
            std::string(name(d)) + shape.to_string() + std::to_string(variant);
        EXPECT_LT(scaled_error(got.y, y), bound) << where;
        if (width > 1) {
          EXPECT_LT(scaled_error(got.dx, dx), 4 * bound) << where;
        }
        if (width > 1) {
          EXPECT_LT(scaled_error(got.dw, dw), bound) << where;
        }
        if (layer) {
          EXPECT_LT(scaled_error(got.db, db), bound) << where;
        }
      }
}

TEST(Norm, StridesRowsAndThreadsChangeNothing) {
  for (bool layer : {true, false}) {
    const Shape shape{2, 200, 100};
    const Array x = Array::random(kF32, shape, 1), w = Array::random(kF32, {100}, 2),
                b = Array::random(kF32, {100}, 3), dy = Array::random(kF32, shape, 4);
    Arrays one, two;
    with_threads(1, [&] { one = run(layer, x, w, b, dy); });
    with_threads(2, [&] { two = run(layer, x, w, b, dy); });
    EXPECT_TRUE(same_bits(one.y, two.y) && same_bits(one.dx, two.dx) && same_bits(one.dw, two.dw));
    if (layer) {
      EXPECT_TRUE(same_bits(one.db, two.db));
    }
    const Array strided = Array::random(kF32, shape, 1, 1, {110, 250, 1});
    const Arrays three = run(layer, strided, w, b, dy);
    EXPECT_TRUE(same_bits(one.y, three.y) && same_bits(one.dx, three.dx) &&
                same_bits(one.dw, three.dw));
    View row = x, dy_row = dy, y_row = one.y, dx_row = one.dx;
    for (View* v : {&row, &dy_row, &y_row, &dx_row})
      v->data = v->as<float>() + 137 * 100, v->shape = Shape{1, 1, 100};
    const Arrays alone = run(layer, row, w, b, dy_row);
    EXPECT_TRUE(same_bits(alone.y, y_row) && same_bits(alone.dx, dx_row));
  }
}

// The norm of a sum has the bits of an addition followed by a norm, whatever the strides.
TEST(Norm, AddsTheResidualOnTheWay) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Shape& shape : {Shape{5, 7}, Shape{2, 30, 64}, Shape{130, 33}, Shape{100}})
      for (bool layer : {true, false}) {
        const int64_t width = shape.back(), rows = shape.numel() / width;
        const Shape gaps = shape.rank() == 2 ? Shape{width + 3, 1} : Shape{};
        const Array x = Array::random(d, shape, 1), r = Array::random(d, shape, 2, 1, gaps),
                    w = Array::random(d, {width}, 3), b = Array::random(d, {width}, 4);
        const Array total = added(x, r, d);
        const Arrays want = run(layer, total, w, b, x);
        const DType statistic = statistics_of(d);
        Array sum(d, shape, gaps), y(d, shape), mean(statistic, {rows}), rstd(statistic, {rows});
        layer ? add_layer_norm(x, r, w, b, 1e-5, sum, y, mean, rstd)
              : add_rms_norm(x, r, w, 1e-5, sum, y, rstd);
        const std::string where = std::string(name(d)) + shape.to_string();
        EXPECT_TRUE(same_bits(sum, total)) << where;
        EXPECT_TRUE(same_bits(y, want.y) && same_bits(rstd, want.rstd)) << where;
        if (layer) {
          EXPECT_TRUE(same_bits(mean, want.mean)) << where;
        }
      }
}

// The other gradient is added before dx is rounded, and changes nothing else.
TEST(Norm, AddsTheGradientOfTheSum) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (bool layer : {true, false}) {
      const Shape shape{2, 65, 33};
      const DType wide = statistics_of(d);  // what the kernel computes in
      const Array x = Array::random(d, shape, 1), dy = Array::random(d, shape, 2),
                  w = Array::random(d, {33}, 3), b = Array::random(d, {33}, 4),
                  dsum = Array::random(d, shape, 5, 1, {67 * 40, 40, 1});
      const Arrays alone = run(layer, x, w, b, dy),
                   exact = run(layer, converted(wide, x), converted(wide, w), converted(wide, b),
                               converted(wide, dy));
      Array dx(d, shape), dw(d, {33}), db(d, {33});
      const Scratch scratch(layer ? layer_norm_backward_workspace(x, dx, dw, db)
                                  : rms_norm_backward_workspace(x, dx, dw));
      layer ? layer_norm_backward(dy, x, w, alone.mean, alone.rstd, dx, dw, db, scratch, dsum)
            : rms_norm_backward(dy, x, w, alone.rstd, dx, dw, scratch, dsum);
      EXPECT_TRUE(same_bits(dx, added(exact.dx, dsum, d))) << name(d) << layer;
      EXPECT_TRUE(same_bits(dw, alone.dw)) << name(d) << layer;
      if (layer) {
        EXPECT_TRUE(same_bits(db, alone.db)) << name(d);
      }
    }
}

TEST(Norm, RefusesAddendsOfOtherTypes) {
  const Array x(kF32, {2, 8}), short_x(kF32, {2, 7}), narrow(kBF16, {2, 8}), s(kF32, {2});
  EXPECT_THROW(add_rms_norm(x, short_x, View{}, 1e-5, x, x, s), ShapeError);
  EXPECT_THROW(add_layer_norm(x, x, View{}, View{}, 1e-5, narrow, x, s, s), DTypeError);
  EXPECT_THROW(rms_norm_backward(x, x, View{}, s, x, View{}, Workspace{}, narrow), DTypeError);
}

TEST(Norm, NoRows) {
  const Arrays got = run(true, Array(kF32, {0, 8}), View{}, View{}, Array(kF32, {0, 8}));
  EXPECT_EQ(values(got.dw), std::vector<double>(8, 0.0));
  EXPECT_EQ(values(got.db), std::vector<double>(8, 0.0));
}

TEST(Norm, OffsetsDoNotSpoilTheVariance) {
  const Array x = Array::of(kF32, {1, 4}, {10000, 10001, 10002, 10003});
  const Arrays got = run(true, x, View{}, View{}, x);
  EXPECT_NEAR(got.y.at(0), -1.5 / std::sqrt(1.25 + 1e-5), 1e-3);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
