#include "sheaf/kernels/fp8.h"

#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/matmul.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array rounded(const Array& x) {
  Array out(x.view().dtype, x.view().shape);
  round_to_fp8(x, out);
  return out;
}

// Of all E4M3 values, the nearest; of two equally near ones, the one whose code is even.
double nearest(double x) {
  double best = 0, distance = INFINITY;
  for (int code = 0; code < 256; ++code) {
    const double value = fp8_value(static_cast<uint8_t>(code)), d = std::fabs(value - x);
    if (!std::isfinite(value)) continue;
    if (d < distance || (d == distance && code % 2 == 0)) best = value, distance = d;
  }
  return best;
}

TEST(Fp8, CodesAreThoseOfE4M3) {
  // Some by hand, from the published format (Micikevicius et al. 2022, table 1).
  EXPECT_EQ(fp8_value(0x7e), 448);
  EXPECT_EQ(fp8_value(0xfe), -448);
  EXPECT_EQ(fp8_value(0x38), 1);
  EXPECT_EQ(fp8_value(0x08), 0x1p-6f);
  EXPECT_EQ(fp8_value(0x07), 0.875f * 0x1p-6f);
  EXPECT_EQ(fp8_value(0x01), 0x1p-9f);
  EXPECT_TRUE(std::isnan(fp8_value(0x7f)));
  EXPECT_TRUE(std::isnan(fp8_value(0xff)));
  for (int code = 0; code < 256; ++code)
    if ((code & 0x7f) != 0x7f) {
      EXPECT_EQ(fp8_code(std::bit_cast<uint32_t>(fp8_value(static_cast<uint8_t>(code)))), code);
    }
  EXPECT_EQ(fp8_code(0x7fc00000), 0x7f);
}

// All numbers of bf16 and f16 below 448, each in a row with one that makes the scale 1.
TEST(Fp8, RoundsToTheNearest) {
  for (DType d : {kBF16, kF16}) {
    std::vector<double> all;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double x = d == kBF16 ? static_cast<double>(static_cast<float>(std::bit_cast<bf16>(static_cast<uint16_t>(bits))))
                                  : static_cast<double>(static_cast<float>(std::bit_cast<f16>(static_cast<uint16_t>(bits))));
      if (std::fabs(x) <= 448) all.push_back(x), all.push_back(448);
    }
    const Array x = Array::of(d, {std::ssize(all) / 2, 2}, all), y = rounded(x);
    for (int64_t i = 0; i < x.view().numel(); i += 2) {
      ASSERT_EQ(y.at(i), nearest(x.at(i))) << name(d) << ' ' << x.at(i);
      ASSERT_EQ(y.at(i + 1), 448);
    }
  }
}

TEST(Fp8, ScalesAreTheLeastPowersOfTwo) {
  for (double largest : {1.0, 1.75, 1.7578125, 448.0, 450.0, 3e-5, 1e30, 1.9e-25}) {
    const double x = static_cast<double>(static_cast<float>(largest));
    const auto scale = std::bit_cast<float>(fp8_scale_bits(std::bit_cast<uint32_t>(static_cast<float>(x))));
    EXPECT_LE(x / scale, 448) << x;
    EXPECT_GT(x / (scale / 2), 448) << x;
    EXPECT_EQ(std::bit_cast<float>(fp8_inverse_bits(std::bit_cast<uint32_t>(static_cast<float>(x)))) * scale, 1);
    EXPECT_EQ(std::bit_cast<uint32_t>(scale) & 0x7fffff, 0u);  // a power of two
    // The relative rounding error is independent of the row's magnitude: that of a 4-bit significand.
    Array row = Array::of(kF32, {1, 3}, {x, x / 3, -x / 50});
    const Array y = rounded(row);
    for (int64_t i = 0; i < 3; ++i) EXPECT_NEAR(y.at(i) / row.at(i), 1, 1.0 / 16) << x;
  }
  EXPECT_GE(std::bit_cast<float>(fp8_scale_bits(0)), 0x1p-100f);  // of zeros, too
}

TEST(Fp8, RowsAreRoundedAloneWhateverTheirStrides) {
  const Array x = Array::random(kF32, {3, 5, 70}, 1, 20), y = rounded(x);
  EXPECT_GT(scaled_error(y, values(x)), 1e-3);  // something was rounded
  for (const Shape& strides : {Shape{5 * 80, 80, 1}, Shape{1, 3, 15}, Shape{70, 210, 1}}) {
    Array other(kF32, x.view().shape, strides);
    other.fill([&](int64_t i) { return x.at(i); });
    EXPECT_TRUE(same_bits(rounded(other), y)) << str(strides);
  }
  Array larger = x.clone();  // other rows' values do not matter
  for (int64_t i = 0; i < 70; ++i) larger.set(i, x.at(i) * 1000);
  const Array z = rounded(larger);
  for (int64_t i = 70; i < x.view().numel(); ++i) ASSERT_EQ(z.at(i), y.at(i));
  const Array in_place = x.clone();
  round_to_fp8(in_place, in_place);
  EXPECT_TRUE(same_bits(in_place, y));
  EXPECT_TRUE(same_bits(rounded(y), y));  // what is rounded stays
  // Into an output with dense columns, from inputs of any layout.
  for (const Shape& strides : {Shape{}, Shape{350, 1, 5}, Shape{1, 3, 15}}) {
    const Array in = strides.empty() ? x : Array(kF32, x.view().shape, strides), columns(kF32, x.view().shape, {350, 1, 5});
    if (!strides.empty()) const_cast<Array&>(in).fill([&](int64_t i) { return x.at(i); });
    round_to_fp8(in, columns);
    EXPECT_EQ(values(columns), values(y)) << str(strides);
  }
}

TEST(Fp8, ARowWithAValueThatIsNotFiniteIsNaN) {
  Array x = Array::random(kBF16, {3, 9}, 1);
  x.set(4, INFINITY), x.set(9 * 2 + 8, NAN);
  const Array y = rounded(x);
  for (int64_t i = 0; i < 27; ++i) EXPECT_EQ(std::isnan(y.at(i)), i / 9 != 1) << i;
  const Array zeros = Array::of(kF32, {1, 4}, {0, 0, 0, 0});
  EXPECT_EQ(values(rounded(zeros)), std::vector<double>(4, 0.0));
}

TEST(Fp8, RefusesWhatItCannotRound) {
  const Array wide(kF64, {2, 3}), x(kF32, {2, 3}), other(kF32, {3, 2}), gaps(kF32, {2, 3}, {6, 1});
  EXPECT_THROW(round_to_fp8(wide, wide), DTypeError);
  EXPECT_THROW(round_to_fp8(x, other), ShapeError);
  EXPECT_THROW(round_to_fp8(x, gaps), ShapeError);
}

Array transposed_copy(const Array& x) {
  const int64_t rows = x.view().shape[0], cols = x.view().shape[1];
  Array out(x.view().dtype, {cols, rows});
  out.fill([&](int64_t i) { return x.at(i % rows * cols + i / rows); });
  return out;
}

// Products of operands that are rounded on the fly, bit for bit those of the rounded operands.
TEST(Fp8, ProductsAreThoseOfRoundedOperands) {
  for (DType d : {kF32, kBF16, kF16}) {
    const Array x = Array::random(d, {2, 9, 50}, 1), w = Array::random(d, {33, 50}, 2), bias = Array::random(d, {33}, 3),
                dy = Array::random(d, {2, 9, 33}, 4, 0.1);
    const Array rx = rounded(x), rw = rounded(w), rdy = rounded(dy), columns = transposed_copy(rounded(transposed_copy(w)));
    const Array y(d, {2, 9, 33}), want_y(d, {2, 9, 33}), dx(d, {2, 9, 50}), want_dx(d, {2, 9, 50}), dw(kF32, {33, 50}),
        want_dw(kF32, {33, 50});
    linear(x, w, bias, y, Scratch(linear_workspace(without_data(x), w, bias, y, true)), true);
    linear(rx, rw, bias, want_y, Scratch(linear_workspace(rx, rw, bias, want_y)));
    EXPECT_TRUE(same_bits(y, want_y)) << name(d);
    matmul(dy, w, dx, Scratch(matmul_workspace(without_data(dy), w, dx, true)), true);
    matmul(rdy, columns, want_dx, Scratch(matmul_workspace(rdy, columns, want_dx)));
    EXPECT_TRUE(same_bits(dx, want_dx)) << name(d);
    linear_weight_gradient(dy, x, dw, Scratch(linear_weight_gradient_workspace(without_data(dy), without_data(x), dw, true)), true);
    const auto by_columns = [&](const Array& rows) {
      const int64_t cols = rows.view().shape.back();
      Array matrix(d, {18, cols});
      matrix.fill([&](int64_t i) { return rows.at(i); });
      return transposed_copy(rounded(transposed_copy(matrix)));
    };
    const Array cdy = by_columns(dy), cx = by_columns(x);
    linear_weight_gradient(cdy, cx, want_dw, Scratch(linear_weight_gradient_workspace(cdy, cx, want_dw)));
    EXPECT_TRUE(same_bits(dw, want_dw)) << name(d);
  }
}

TEST(Fp8, ProductsOfBatchesAndOfNothing) {
  const Array a = Array::random(kF32, {2, 3, 4, 20}, 1), b = Array::random(kF32, {3, 20, 6}, 2), c(kF32, {2, 3, 4, 6});
  matmul(a, b, c, Scratch(matmul_workspace(without_data(a), without_data(b), c, true)), true);
  for (int64_t i = 0; i < 6; ++i) {  // one by one
    const auto nth = [](const Array& x, int64_t n, int64_t rows, int64_t cols) {
      Array out(kF32, {rows, cols});
      out.fill([&](int64_t k) { return x.at(n * rows * cols + k); });
      return out;
    };
    const Array one(kF32, {4, 6}), a_one = nth(a, i, 4, 20), b_one = nth(b, i % 3, 20, 6);
    matmul(a_one, b_one, one, Scratch(matmul_workspace(a_one, b_one, one, true)), true);
    EXPECT_TRUE(same_bits(one, nth(c, i, 4, 6))) << i;
  }
  const Array x(kF32, {3, 0}), w(kF32, {2, 0}), bias = Array::of(kF32, {2}, {1, 2}), y(kF32, {3, 2});
  linear(x, w, bias, y, Scratch(linear_workspace(x, w, bias, y, true)), true);
  EXPECT_EQ(values(y), (std::vector<double>{1, 2, 1, 2, 1, 2}));
  const Array none(kF32, {0, 5}), w5 = Array::random(kF32, {2, 5}, 1), nothing(kF32, {0, 2});
  linear(none, w5, View{}, nothing, Scratch(linear_workspace(none, w5, View{}, nothing, true)), true);
  const Array wide(kF64, {3, 5}), wide_w(kF64, {2, 5}), wide_y(kF64, {3, 2});
  EXPECT_THROW(linear(wide, wide_w, View{}, wide_y, Scratch(linear_workspace(wide, wide_w, View{}, wide_y, true)), true), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
