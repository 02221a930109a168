#include "sheaf/kernels/copy.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/tests/kernels/views.h"

namespace sheaf {
namespace {
namespace cpu = kernels::cpu;
using test::Buffer;

const DType kAll[] = {kF64, kF32, kBF16, kF16, kI64, kI32, kU32, kU16, kU8, kI8, kBool};

TEST(Copy, EveryPairOfTypesKeepsSmallIntegers) {
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      Buffer src(from, {3, 43}, {1, 0}), dst(to, {3, 43});
      src.fill([](int64_t i) { return double(i % 100); });
      cpu::copy(src.view(), dst.view());
      for (int64_t i = 0; i < src.numel(); ++i)
        EXPECT_EQ(dst.get(i), to == kBool ? double(src.get(i) != 0) : src.get(i))
            << name(from) << name(to);
    }
  }
}

// Blocks are converted in place if possible: possible on both sides, on one, on none.
TEST(Copy, ConvertsLongRunsAnywhere) {
  RankContext context;
  context.threads = 3;
  RankScope scope(context);
  for (const auto& [from, to] : {std::pair{kF32, kBF16},
                                 {kBF16, kF32},
                                 {kF64, kF16},
                                 {kF16, kF64},
                                 {kI32, kI64},
                                 {kI64, kF32},
                                 {kF32, kU8},
                                 {kBF16, kF16}})
    for (const Shape& shape : {Shape{90001}, Shape{3, 1025, 41}, Shape{70, 1300}})
      for (int gaps = 0; gaps < 4; ++gaps) {
        std::vector<int> reversed;
        for (int i = shape.rank() - 1; i >= 0; --i) reversed.push_back(i);
        Buffer src(from, shape, gaps == 3 ? reversed : std::vector<int>(), gaps & 1),
            dst(to, shape, {}, gaps >> 1);
        src.fill([](int64_t i) { return double(i % 127); });
        cpu::copy(src.view(), dst.view());
        for (int64_t i = 0; i < src.numel(); ++i)
          ASSERT_EQ(dst.get(i), i % 127) << name(from) << name(to) << gaps << " at " << i;
      }
}

TEST(Copy, ConversionsRoundSaturateAndTruncate) {
  Buffer x(kF32, {7}), i8(kI8, {7}), u8(kU8, {7}), b(kBF16, {7}), truth(kBool, {7});
  const double in[] = {1.9, -1.9, 300, -300, NAN, INFINITY, 1.00390625};
  x.fill([&](int64_t i) { return in[i]; });
  cpu::copy(x.view(), i8.view()), cpu::copy(x.view(), u8.view()), cpu::copy(x.view(), b.view()),
      cpu::copy(x.view(), truth.view());
  EXPECT_EQ(i8.values(), (std::vector<double>{1, -1, 127, -128, 0, 127, 1}));
  EXPECT_EQ(u8.values(), (std::vector<double>{1, 0, 255, 0, 0, 255, 1}));
  EXPECT_EQ(b.get(6), 1.0);  // a tie, to even
  EXPECT_TRUE(std::isnan(b.get(4)) && std::isinf(b.get(5)));
  EXPECT_EQ(truth.values(), (std::vector<double>{1, 1, 1, 1, 1, 1, 1}));
}

TEST(Copy, EveryPermutationOfFourDimensions) {
  const Shape shape{3, 33, 9, 40};
  std::vector<int> order{0, 1, 2, 3};
  RankContext context;
  context.threads = 3;
  RankScope scope(context);
  do {
    for (const DType dtype : {kF32, kBF16, kU8, kF64}) {
      Buffer src(dtype, shape, order, dtype == kF32 ? 1 : 0), dst(dtype, shape),
          back(dtype, shape, order, 2);
      src.fill([](int64_t i) { return double(i % 251); });
      cpu::copy(src.view(), dst.view());
      cpu::copy(dst.view(), back.view());
      EXPECT_EQ(dst.values(), src.values());
      EXPECT_EQ(back.values(), src.values());
      // The gaps keep their pattern.
      EXPECT_EQ(back.memory()[31], 0xA5);
      EXPECT_EQ(static_cast<unsigned char>(back.at(0)[size_of(dtype)]), 0xA5);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Copy, BroadcastsAndTakesEmptyViews) {
  Buffer row(kF32, {37}), out(kF32, {5, 37}), column(kF32, {5, 1}), none(kF32, {0, 4}),
      empty(kF32, {0, 4});
  row.random(1), column.random(2);
  cpu::copy(row.expanded({5, 37}), out.view());
  for (int64_t i = 0; i < out.numel(); ++i) EXPECT_EQ(out.get(i), row.get(i % 37));
  cpu::copy(column.expanded({5, 37}), out.view());
  for (int64_t i = 0; i < out.numel(); ++i) EXPECT_EQ(out.get(i), column.get(i / 37));
  cpu::copy(none.view(), empty.view());
  EXPECT_THROW(cpu::copy(row.view(), out.view()), ShapeError);
}

TEST(Fill, EveryType) {
  for (const DType dtype : kAll) {
    Buffer out(dtype, {7, 50}, {1, 0}, dtype == kF32);
    cpu::fill(out.view(), 3);
    for (int64_t i = 0; i < out.numel(); ++i)
      EXPECT_EQ(out.get(i), dtype == kBool ? 1 : 3) << name(dtype);
  }
}

TEST(AddInto, MixedTypesRoundOnce) {
  Buffer total(kF32, {30, 30}), part(kBF16, {30, 30}, {1, 0}), count(kI32, {5}), more(kI32, {5});
  total.random(1), part.random(2);
  const std::vector<double> before = total.values();
  cpu::add_into(total.view(), part.view());
  for (int64_t i = 0; i < total.numel(); ++i)
    EXPECT_EQ(total.get(i), static_cast<float>(before[static_cast<size_t>(i)] + part.get(i)));
  count.fill([](int64_t i) { return double(i); }), more.fill([](int64_t) { return 10.0; });
  cpu::add_into(count.view(), more.view());
  EXPECT_EQ(count.values(), (std::vector<double>{10, 11, 12, 13, 14}));
}

TEST(Arange, FloatsAndIntegers) {
  Buffer f(kF32, {2000}, {0}, 1), n(kI64, {5});
  cpu::arange(1.5, 0.25, f.view());
  for (int64_t i = 0; i < 2000; ++i) EXPECT_EQ(f.get(i), 1.5 + 0.25 * double(i));
  cpu::arange(3, -2, n.view());
  EXPECT_EQ(n.values(), (std::vector<double>{3, 1, -1, -3, -5}));
}

}  // namespace
}  // namespace sheaf
