#include "sheaf/kernels/embedding.h"

#include <gmock/gmock.h>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array tokens_of(DType d, const Shape& shape, int64_t vocabulary) {
  Array t(d, shape);
  t.fill([&](int64_t i) { return static_cast<double>((i * i * 7 + i) % vocabulary); });
  return t;
}

TEST(Embedding, ForwardAndBackward) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (DType index : {kI64, kI32, kU16, kU8})
      for (int64_t width : {1, 16, 37}) {
        const Array tokens = tokens_of(index, {3, 20}, 11),
                    table = Array::random(d, {11, width}, 1), out(d, {3, 20, width});
        embedding(tokens, table, whole_table(table), out);
        const Array dout = Array::random(d, {3, 20, width}, 2), dtable(d, {11, width});
        std::vector<double> want(60 * width), gradient(11 * width);
        for (int64_t r = 0; r < 60; ++r)
          for (int64_t j = 0; j < width; ++j) {
            want[r * width + j] = table.at(static_cast<int64_t>(tokens.at(r)) * width + j);
            gradient[static_cast<int64_t>(tokens.at(r)) * width + j] += dout.at(r * width + j);
          }
        EXPECT_EQ(values(out), want);
        embedding_backward(tokens, dout, whole_table(dtable), dtable, false,
                           Scratch(embedding_backward_workspace(without_data(tokens),
                                                                without_data(dout), dtable)));
        EXPECT_LT(scaled_error(dtable, gradient), 4 * epsilon(d)) << name(d) << width;
        const auto before = values(dtable);
        embedding_backward(tokens, dout, whole_table(dtable), dtable, true,
                           Scratch(embedding_backward_workspace(tokens, dout, dtable)));
        for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += before[i];
        EXPECT_LT(scaled_error(dtable, gradient), 4 * epsilon(d)) << name(d) << width;
      }
}

TEST(Embedding, NamesTheTokenThatIsOutside) {
  const Array tokens = Array::of(kI32, {2, 2}, {0, 1, 11, 2}), table(kF32, {11, 4}),
              out(kF32, {2, 2, 4});
  try {
    embedding(tokens, table, whole_table(table), out);
    FAIL();
  } catch (const DataError& e) {
    EXPECT_THAT(e.what(),
                ::testing::AllOf(::testing::HasSubstr("token 11"), ::testing::HasSubstr("[1,0]"),
                                 ::testing::HasSubstr("of 11")));
  }
  EXPECT_THROW(
      embedding(Array::of(kI64, {1}, {-1}), table, whole_table(table), Array(kF32, {1, 4})),
      DataError);
  EXPECT_THROW(embedding_backward(tokens, out, whole_table(table), table, false, Scratch(0)),
               DataError);
  EXPECT_THROW(embedding_backward(Array::of(kI64, {1}, {-1}), Array(kF32, {1, 4}),
                                  whole_table(table), table, false, Scratch(0)),
               DataError);
}

// Ranks with some rows each, one with none: their lookups add up to the whole lookup, and their
// gradients concatenate to the whole gradient.
TEST(Embedding, PartsOfATable) {
  const int64_t rows = 11, width = 37;
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (bool accumulate : {false, true}) {
      const Array tokens = tokens_of(kI32, {3, 20}, rows),
                  table = Array::random(d, {rows, width}, 1), out(d, {3, 20, width}),
                  dout = Array::random(d, {3, 20, width}, 2), dtable = table.clone();
      embedding(tokens, table, whole_table(table), out);
      embedding_backward(tokens, dout, whole_table(dtable), dtable, accumulate,
                         Scratch(embedding_backward_workspace(tokens, dout, dtable)));
      std::vector<double> sum(60 * width), gradient;
      for (auto [first, last] : {std::pair{0, 3}, {3, 3}, {3, 10}, {10, 11}}) {
        const TablePart part{first, rows};
        Array mine(d, {last - first, width});
        mine.fill([&](int64_t i) { return table.at(first * width + i); });
        const Array some(d, {3, 20, width});
        embedding(tokens, mine, part, some);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += some.at(static_cast<int64_t>(i));
        embedding_backward(tokens, dout, part, mine, accumulate,
                           Scratch(embedding_backward_workspace(tokens, dout, mine)));
        for (const double g : values(mine)) gradient.push_back(g);
      }
      EXPECT_EQ(sum, values(out)) << name(d);
      EXPECT_EQ(gradient, values(dtable)) << name(d) << accumulate;
    }
  const Array mine(kF32, {3, 4}), out(kF32, {1, 4});
  for (const double token : {-1.0, 11.0}) {
    const Array bad = Array::of(kI64, {1}, {token});
    EXPECT_THROW(embedding(bad, mine, {4, 11}, out), DataError);
    EXPECT_THROW(embedding_backward(bad, out, {4, 11}, mine, false, Scratch(0)), DataError);
  }
}

TEST(Embedding, StridesAndThreadsChangeNothing) {
  const Array tokens = tokens_of(kI64, {500}, 30), dout = Array::random(kF32, {500, 300}, 1),
              one(kF32, {30, 300}), two(kF32, {30, 300});
  with_threads(1,
               [&] { embedding_backward(tokens, dout, whole_table(one), one, false, Scratch(0)); });
  with_threads(2,
               [&] { embedding_backward(tokens, dout, whole_table(two), two, false, Scratch(0)); });
  EXPECT_TRUE(same_bits(one, two));
  const Array strided = Array::random(kF32, {500, 300}, 1, 1, {310, 1}),
              three(kF32, {30, 300}, {400, 1});
  Array every_other(kI64, {500}, {2});
  every_other.fill([&](int64_t i) { return tokens.at(i); });
  embedding_backward(every_other, strided, whole_table(three), three, false, Scratch(0));
  EXPECT_TRUE(same_bits(one, three));
}

TEST(Embedding, NoTokensGiveZeroGradient) {
  for (DType d : {kF32, kBF16}) {
    const Array tokens(kI64, {0}), dout(d, {0, 5}), dtable(d, {4, 5});
    embedding_backward(tokens, dout, whole_table(dtable), dtable, false,
                       Scratch(embedding_backward_workspace(tokens, dout, dtable)));
    EXPECT_EQ(values(dtable), std::vector<double>(20, 0.0));
  }
}

}  // namespace
}  // namespace sheaf::kernels::cpu
