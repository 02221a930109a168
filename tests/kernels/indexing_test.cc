#include "sheaf/kernels/indexing.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/tests/kernels/views.h"

namespace sheaf {
namespace {
namespace cpu = kernels::cpu;
using test::Buffer;

/// Row-major position of `at` in `shape`.
int64_t flat(const Shape& shape, const Shape& at) {
  int64_t i = 0;
  for (int d = 0; d < shape.rank(); ++d) i = i * shape[d] + at[d];
  return i;
}
Shape unflat(const Shape& shape, int64_t i) {
  Shape at = Shape::filled(shape.rank(), 0);
  for (int d = shape.rank() - 1; d >= 0; --d) at[d] = i % shape[d], i /= shape[d];
  return at;
}

TEST(Gather, EveryDimensionAndLayout) {
  for (const DType dtype : {kF64, kF32, kBF16, kU8}) {
    for (int dim = 0; dim < 3; ++dim) {
      for (const auto& order : {std::vector<int>{0, 1, 2}, std::vector<int>{2, 0, 1}}) {
        const Shape shape{5, 6, 70};
        Shape out_shape = shape;
        out_shape[dim] = 9;
        Buffer x(dtype, shape, order), index(kI32, out_shape, order), out(dtype, out_shape);
        x.random(1, 0, 9), index.random(2, 0, double(shape[dim]));
        cpu::gather(x.view(), dim, index.view(), out.view());
        for (int64_t i = 0; i < out.numel(); ++i) {
          Shape at = unflat(out_shape, i);
          at[dim] = static_cast<int64_t>(index.get(i));
          ASSERT_EQ(out.get(i), x.get(flat(shape, at)));
        }
      }
    }
  }
}

TEST(Take, EveryDimensionAndLayout) {
  for (const DType dtype : {kF32, kBF16}) {
    for (int dim = 0; dim < 3; ++dim) {
      for (const auto& order : {std::vector<int>{0, 1, 2}, std::vector<int>{2, 0, 1}}) {
        const Shape shape{5, 6, 70};
        Shape out_shape = shape;
        out_shape[dim] = 11;
        Buffer x(dtype, shape, order), index(kI64, {11}, {0}, 1), out(dtype, out_shape);
        x.random(1), index.random(2, 0, double(shape[dim]));
        cpu::take(x.view(), dim, index.view(), out.view());
        for (int64_t i = 0; i < out.numel(); ++i) {
          Shape at = unflat(out_shape, i);
          at[dim] = static_cast<int64_t>(index.get(at[dim]));
          ASSERT_EQ(out.get(i), x.get(flat(shape, at)));
        }
      }
    }
  }
}

TEST(ScatterAdd, AddsInOrderOnAnyNumberOfThreads) {
  for (int dim = 0; dim < 2; ++dim) {
    Buffer src(kF32, {400, 50}, {1, 0}), index(kU16, {400, 50});
    src.random(1), index.random(2, 0, 7);
    Shape shape{400, 50};
    shape[dim] = 7;
    Buffer want(kF32, shape);
    want.fill([](int64_t) { return 0.5; });
    for (int64_t i = 0; i < src.numel();
         ++i) {  // row-major order is the order of i along every line
      Shape at = unflat({400, 50}, i);
      at[dim] = static_cast<int64_t>(index.get(i));
      const int64_t to = flat(shape, at);
      float sum = static_cast<float>(want.get(to)) + static_cast<float>(src.get(i));
      std::memcpy(want.at(to), &sum, 4);
    }
    for (const int threads : {1, 3}) {
      RankContext context;
      context.threads = threads;
      RankScope scope(context);
      Buffer out(kF32, shape);
      out.fill([](int64_t) { return 0.5; });
      cpu::scatter_add(out.view(), dim, index.view(), src.view());
      EXPECT_EQ(out.values(), want.values());
    }
  }
}

TEST(TakeAdd, IsScatterAddWithOneIndexForAll) {
  for (int dim = 0; dim < 2; ++dim) {
    const Shape shape{dim ? 300 : 9, dim ? 9 : 300};
    Shape source = shape;
    source[dim] = 60;
    Buffer src(kBF16, source), index(kI32, {60}), a(kF32, shape), b(kF32, shape);
    src.random(1), index.random(2, 0, 9), a.random(3), b.random(3);
    cpu::take_add(a.view(), dim, index.view(), src.view());
    View wide{index.view().data, kI32, source, {dim ? 0 : 1, dim ? 1 : 0}};
    cpu::scatter_add(b.view(), dim, wide, src.view());
    EXPECT_EQ(a.values(), b.values());
    Buffer untouched(kF32, shape);
    untouched.random(3);
    EXPECT_NE(a.values(), untouched.values());
  }
}

TEST(Indexing, BadIndicesAreNamedBeforeAnythingIsWritten) {
  Buffer x(kF32, {4, 3}), index(kI64, {2}), out(kF32, {2, 3});
  index.fill([](int64_t i) { return i ? 4.0 : 0.0; });
  const auto before = out.memory();
  try {
    cpu::take(x.view(), 0, index.view(), out.view());
    FAIL();
  } catch (const DataError& e) {
    EXPECT_STREQ(e.what(), "[take] index 4 at position 1 is out of range for size 4");
  }
  EXPECT_EQ(out.memory(), before);
  index.fill([](int64_t) { return -1.0; });
  EXPECT_THROW(cpu::take_add(x.view(), 0, index.view(), out.view()), DataError);
  Buffer real(kF32, {2});
  EXPECT_THROW(cpu::take(x.view(), 0, real.view(), out.view()), DTypeError);
}

TEST(Cumsum, BothDirectionsEveryDimension) {
  for (const DType dtype : {kF64, kF32, kBF16, kI32}) {
    for (int dim = 0; dim < 2; ++dim) {
      for (const bool reverse : {false, true}) {
        Buffer x(dtype, {7, 2100}, {1, 0}), y(dtype, {7, 2100});
        x.random(1);
        cpu::cumsum(x.view(), dim, reverse, y.view());
        std::vector<double> want(x.values());
        const int64_t n = x.view().shape[dim], step = dim ? 1 : 2100, lines = dim ? 7 : 2100,
                      jump = dim ? 2100 : 1;
        for (int64_t l = 0; l < lines; ++l) {
          double s = 0;
          for (int64_t k = 0; k < n; ++k) {
            const size_t at = static_cast<size_t>(l * jump + (reverse ? n - 1 - k : k) * step);
            want[at] = s += want[at];
          }
        }
        EXPECT_LE(test::scaled_error(y.values(), want), dtype == kI32 ? 0 : test::tolerance(dtype));
      }
    }
  }
}

TEST(Pad, SurroundsWithTheValue) {
  Buffer x(kF32, {3, 4}, {1, 0}), y(kF32, {6, 5});
  x.random(1);
  cpu::pad(x.view(), {1, 0}, -7, y.view());
  for (int64_t r = 0; r < 6; ++r)
    for (int64_t c = 0; c < 5; ++c)
      EXPECT_EQ(y.get(r * 5 + c), r >= 1 && r < 4 && c < 4 ? x.get((r - 1) * 4 + c) : -7.0);
  EXPECT_THROW(cpu::pad(x.view(), {4, 0}, 0, y.view()), ShapeError);
}

TEST(Indexing, ZeroSizes) {
  Buffer x(kF32, {4, 0}), index(kI64, {2}), out(kF32, {2, 0}), none(kI64, {0}), rows(kF32, {4, 3}),
      no_rows(kF32, {0, 3});
  index.fill([](int64_t) { return 1.0; });
  cpu::take(x.view(), 0, index.view(), out.view());
  cpu::take(rows.view(), 0, none.view(), no_rows.view());
  cpu::take_add(rows.view(), 0, none.view(), no_rows.view());
  cpu::cumsum(x.view(), 1, false, x.view());
  cpu::pad(no_rows.view(), {2, 0}, 1, rows.view());
  EXPECT_EQ(rows.values(), std::vector<double>(12, 1.0));
}

TEST(DocumentBegins, BehindEachEndOfText) {
  const int tokens[] = {4, 7, 1, 7, 7, 2, /**/ 7, 1, 2, 3, 4, 7}, want[] = {0, 0, 2, 2, 4, 5, /**/ 0, 1, 1, 1, 1, 1};
  for (const DType d : {kI64, kI32, kU32, kU16, kU8})
    for (const auto& order : {std::vector<int>{0, 1}, std::vector<int>{1, 0}}) {
      Buffer x(d, {2, 6}, order, 2), begins(kI32, {2, 6});
      x.fill([&](int64_t i) { return tokens[i]; });
      cpu::document_begins(x.view(), 7, begins.view());
      for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(begins.get(i), want[i]) << name(d) << ' ' << i;
      cpu::document_begins(x.view(), 70000, begins.view());  // no token has this id
      for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(begins.get(i), 0) << name(d) << ' ' << i;
    }
  const Buffer none(kI32, {2, 0});
  cpu::document_begins(none.view(), 0, none.view());
}

TEST(DocumentBegins, RefusesOtherTypesAndShapes) {
  const Buffer tokens(kI32, {1, 3}), longer(kI32, {1, 4}), wide(kI64, {1, 3}), apart(kI32, {1, 3}, {}, 1), real(kF32, {1, 3});
  EXPECT_THROW(cpu::document_begins(tokens.view(), 0, longer.view()), ShapeError);
  EXPECT_THROW(cpu::document_begins(tokens.view(), 0, apart.view()), ShapeError);
  EXPECT_THROW(cpu::document_begins(tokens.view(), 0, wide.view()), DTypeError);
  EXPECT_THROW(cpu::document_begins(real.view(), 0, tokens.view()), DTypeError);
}

}  // namespace
}  // namespace sheaf
