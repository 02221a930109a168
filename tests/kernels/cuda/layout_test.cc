// Positions in strided operands with more elements than a test can allocate. Empty in builds for a
// real GPU: it tests device functions, which are called as on the emulated GPU.
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "sheaf/kernels/cuda/config.h"

#if SHEAF_CUDA_EMULATED
#include "sheaf/kernels/cuda/rows.h"
#endif

namespace sheaf::kernels::cuda {
namespace {

#if SHEAF_CUDA_EMULATED

TEST(CudaLayout, QuotientsOfAllNumbers) {
  std::mt19937_64 engine(1);
  std::set<int64_t> divisors;
  for (int64_t d = 1; d <= 300; ++d) divisors.insert(d);
  for (int bit = 1; bit < 62; ++bit) {
    const int64_t power = int64_t{1} << bit;
    for (int64_t d : {power - 1, power, power + 1}) divisors.insert(d);
    divisors.insert(power + static_cast<int64_t>(engine() % static_cast<uint64_t>(power)));
  }
  divisors.insert((int64_t{1} << 62) - 1);
  for (int64_t d : divisors) {
    const Divider by(d);
    const auto check = [&](int64_t n) {
      if (n < 0) return;
      ASSERT_EQ(by.quotient(n), n / d) << n << " / " << d;
      if (n <= INT32_MAX && d <= INT32_MAX) {
        ASSERT_EQ(by.short_quotient(static_cast<unsigned>(n)), n / d) << n << " / " << d;
      }
    };
    for (int64_t most : {int64_t{1000}, int64_t{INT32_MAX}, int64_t{UINT32_MAX}, INT64_MAX}) {
      const int64_t multiple = most / d * d;  // where the quotient changes
      for (int64_t n : {multiple - 1, multiple, most, most - 1}) check(n);
      for (int turn = 0; turn < 100; ++turn) {
        const auto n = static_cast<int64_t>(engine() % static_cast<uint64_t>(most));
        check(n), check(n / d * d), check(n / d * d - 1);
      }
      if (HasFatalFailure()) return;
    }
  }
}

/// The offset of element i of a row-major enumeration.
int64_t offset_of(const Shape& shape, const Shape& strides, int64_t i) {
  int64_t out = 0;
  for (int d = shape.rank() - 1; d >= 0; --d) out += i % shape[d] * strides[d], i /= shape[d];
  return out;
}

TEST(CudaLayout, OffsetsOnEitherSideOfTwoToThe31) {
  std::mt19937_64 engine(2);
  const Shape rows{1, 0, 5000, 7}, columns{3, 1, 90000, 1 << 20};
  for (const Shape& shape :
       {Shape{2, 3, 5, 7}, Shape{3, 1, 1 << 10, 699050}, Shape{2, 1, 1 << 10, 1 << 20},
        Shape{3, 50021, 4099, 1013}, Shape{1, 1, 1, 1}}) {
    const Layout<2> at(shape, {rows, columns}, Order::row_major);
    ASSERT_EQ(at.numel, shape.numel());
    for (int turn = 0; turn < 1000; ++turn) {
      const auto last = at.numel - 1;
      const int64_t i =
          turn == 0 ? last : static_cast<int64_t>(engine() % static_cast<uint64_t>(at.numel));
      int64_t out[2];
      at.offsets(i, out);
      for (int m = 0; m < 2; ++m) {
        EXPECT_EQ(out[m], offset_of(shape, m == 0 ? rows : columns, i))
            << shape.to_string() << ' ' << i;
        EXPECT_EQ(at.offset(m, i), out[m]) << shape.to_string() << ' ' << i;
      }
    }
  }
}

TEST(CudaLayout, OrderOfMemoryMeetsEveryElementOnce) {
  const Shape shape{4, 1, 5, 6}, to{1, 9, 24, 4}, from{-30, 2, 6, 1};
  const Layout<2> at(shape, {to, from});
  std::set<std::pair<int64_t, int64_t>> want, got;
  for (int64_t i = 0; i < shape.numel(); ++i)
    want.insert({offset_of(shape, to, i), offset_of(shape, from, i)});
  for (int64_t i = 0; i < at.numel; ++i) {
    int64_t out[2];
    at.offsets(i, out);
    EXPECT_EQ(out[0], i);  // dense
    got.insert({out[0], out[1]});
  }
  EXPECT_EQ(got, want);
}

TEST(CudaLayout, RowsBeyondTwoToThe31) {
  const View v{nullptr, kU8, {3, 1 << 30, 2, 16}, {int64_t{1} << 40, 40, 20, 1}};
  const auto rows = rows_of<const char>("test", v);
  EXPECT_EQ(rows.count, int64_t{6} << 30);
  const Shape heads{3, 1 << 30, 2}, strides{int64_t{1} << 40, 40, 20};
  for (int64_t row : {int64_t{0}, int64_t{1}, (int64_t{1} << 31) - 1, int64_t{1} << 31,
                      (int64_t{1} << 32) + 5, rows.count - 1})
    EXPECT_EQ(rows.at.offset(0, row), offset_of(heads, strides, row)) << row;
}

#endif

}  // namespace
}  // namespace sheaf::kernels::cuda
