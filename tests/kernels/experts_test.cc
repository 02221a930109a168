#include "sheaf/kernels/experts.h"

#include <gmock/gmock.h>

#include <limits>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;
using ::testing::ElementsAre;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(TopK, TheFirstOfEqualsComesFirst) {
  const Array x = Array::of(kF32, {3, 5}, {1, 3, 3, -2, 3, kNan, 7, kNan, 8, 7, -0.0, 0, 1, 0, -1}), out(kI64, {3, 4});
  top_k(x, out);
  EXPECT_THAT(values(out), ElementsAre(1, 2, 4, 0, 0, 2, 3, 1, 2, 0, 1, 3));
}

// As a router's few choices, where equals and NaN occur.
TEST(TopK, ManyComeAsFewDo) {
  std::vector<double> given(60);
  for (size_t i = 0; i < given.size(); ++i) given[i] = i % 7 == 3 ? kNan : static_cast<double>(i * 5 % 11);
  const Array x = Array::of(kF32, {2, 30}, given), few(kI64, {2, 16}), many(kI64, {2, 17}), all(kI64, {2, 30});
  top_k(x, few), top_k(x, many), top_k(x, all);
  for (int64_t row = 0; row < 2; ++row)
    for (int64_t i = 0; i < 17; ++i) {
      EXPECT_EQ(many.at(row * 17 + i), all.at(row * 30 + i));
      if (i == 16) continue;
      EXPECT_EQ(few.at(row * 16 + i), many.at(row * 17 + i));
    }
}

TEST(TopK, OfAllTypesAsSorting) {
  for (DType d : {kF32, kF64, kBF16, kF16}) {
    const Array x = Array::random(d, {40, 19}, 1), out(kI64, {40, 19});
    top_k(x, out);
    for (int64_t row = 0; row < 40; ++row)
      for (int64_t i = 1; i < 19; ++i) {
        const auto at = [&](int64_t k) { return static_cast<int64_t>(out.at(row * 19 + k)); };
        const double a = x.at(row * 19 + at(i - 1)), b = x.at(row * 19 + at(i));
        EXPECT_TRUE(a > b || (a == b && at(i - 1) < at(i)));
      }
  }
}

// Two groups of 2 and 3 tokens, two places for each of three experts: the third choice of an expert in a group is dropped.
TEST(Route, FillsPlacesInTheOrderOfTokens) {
  const Array choices = Array::of(kI64, {1, 5, 2}, {2, 0, 0, 2, 0, 1, 1, 0, 0, 1}), slots(kI32, {1, 5, 2}),
              sources(kI32, {3, 1, 2, 2}), counts(kI32, {3, 1, 2});
  route(choices, 2, slots, sources, counts);
  EXPECT_THAT(values(slots), ElementsAre(4, 0, 1, 5, 0, 2, 3, 1, -1, -1));
  EXPECT_THAT(values(sources), ElementsAre(1, 2, 0, 3, -1, -1, 1, 2, 0, 3, -1, -1));
  EXPECT_THAT(values(counts), ElementsAre(2, 2, 0, 2, 2, 0));
}

// The same choices of three experts in two parts, [0, 1) and [1, 3): the same choices are dropped.
TEST(Route, PartsHaveTheirExpertsOneBehindAnother) {
  const Array choices = Array::of(kI64, {1, 5, 2}, {2, 0, 0, 2, 0, 1, 1, 0, 0, 1}), slots(kI32, {1, 5, 2}),
              sources(kI32, {2, 1, 2, 4}), counts(kI32, {3, 1, 2});
  route(choices, 2, slots, sources, counts);
  EXPECT_THAT(values(counts), ElementsAre(2, 2, 0, 2, 2, 0));
  EXPECT_THAT(values(slots), ElementsAre(4, 0, 1, 5, 0, 4, 5, 1, -1, -1));
  EXPECT_THAT(values(sources), ElementsAre(1, 2, -1, -1, 0, 3, -1, -1, 0, 3, -1, -1, 1, 2, -1, -1));
}

// Tokens that choose an expert twice ask for more rows than a part has: the last choices are dropped.
TEST(Route, APartHasAsManyRowsAsItHas) {
  const Array choices = Array::of(kI64, {1, 3, 2}, {1, 1, 0, 0, 1, 0}), slots(kI32, {1, 3, 2}), sources(kI32, {1, 1, 1, 4}),
              counts(kI32, {2, 1, 1});
  route(choices, 9, slots, sources, counts);
  EXPECT_THAT(values(counts), ElementsAre(3, 1));
  EXPECT_THAT(values(slots), ElementsAre(3, -1, 0, 1, -1, 2));
  EXPECT_THAT(values(sources), ElementsAre(2, 3, 5, 0));
}

TEST(Route, NamesAChoiceThatIsNoExpert) {
  for (const double wrong : {-1.0, 3.0}) {
    const Array choices = Array::of(kI64, {1, 2, 1}, {0, wrong}), slots(kI32, {1, 2, 1}), sources(kI32, {3, 1, 1, 2}),
                counts(kI32, {3, 1, 1});
    EXPECT_THROW(route(choices, 2, slots, sources, counts), DataError);
  }
}

struct Sent {
  Array slots, sources, counts;
};
// With choices that prefer some experts.
Sent sent(int64_t sequences, int64_t tokens, int64_t choices, int64_t experts, int64_t groups, int64_t places) {
  Array chosen(kI64, {sequences, tokens, choices});
  chosen.fill([&](int64_t i) { return static_cast<double>((i * i / 3 + i) % 7 % experts); });
  Sent out{Array(kI32, {sequences, tokens, choices}), Array(kI32, {experts, sequences, groups, places}),
           Array(kI32, {experts, sequences, groups})};
  route(chosen, places, out.slots, out.sources, out.counts);
  return out;
}

// A row returns to its token, and a token to its choices; dropped choices are skipped.
TEST(ToExperts, AndBack) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const int64_t width : {1, 16, 37, 600})
      for (const int64_t groups : {1, 3}) {
        const Sent s = sent(2, 11, 3, 5, groups, 4);
        const DType wide = d == kF64 ? kF64 : kF32;
        const Array x = Array::random(d, {2, 11, width}, 1), weights = Array::random(wide, {2, 11, 3}, 2),
                    rows(d, {5, 2, groups, 4, width}), plain(d, {5, 2, groups, 4, width});
        to_experts(x, weights, s.slots, s.sources, rows);
        to_experts(x, View{}, s.slots, s.sources, plain);
        std::vector<double> want(static_cast<size_t>(rows.view().numel()), 0.0), unweighted = want;
        std::vector<int64_t> row_of(66, -1);
        for (int64_t c = 0; c < 66; ++c) {
          const auto slot = static_cast<int64_t>(s.slots.at(c));
          if (slot < 0) continue;
          const int64_t token = c / 3 % 11, sequence = c / 33;
          int64_t group = 0;
          while (11 * (group + 1) / groups <= token) ++group;
          row_of[c] = ((slot / 4 * 2 + sequence) * groups + group) * 4 + slot % 4;
          for (int64_t i = 0; i < width; ++i) {
            want[row_of[c] * width + i] = x.at(c / 3 * width + i) * weights.at(c);
            unweighted[row_of[c] * width + i] = x.at(c / 3 * width + i);
          }
        }
        EXPECT_EQ(values(plain), unweighted);
        EXPECT_LT(scaled_error(rows, want), 4 * epsilon(d));

        const Array there = Array::random(d, {5, 2, groups, 4, width}, 3), y(d, {2, 11, width}), dots(wide, {2, 11, 3});
        from_experts(there, weights, s.slots, y);
        choice_dots(there, x, s.slots, dots);
        std::vector<double> sums(static_cast<size_t>(22 * width), 0.0), products(66, 0.0);
        for (int64_t c = 0; c < 66; ++c)
          for (int64_t i = 0; row_of[c] >= 0 && i < width; ++i) {
            sums[c / 3 * width + i] += there.at(row_of[c] * width + i) * weights.at(c);
            products[c] += there.at(row_of[c] * width + i) * x.at(c / 3 * width + i);
          }
        EXPECT_LT(scaled_error(y, sums), 4 * epsilon(d));
        EXPECT_LT(scaled_error(dots, products), 20 * epsilon(wide));
      }
}

// Rows of some parts add only their own contribution: a choice's row is in one of the parts.
TEST(ToExperts, AndBackFromSomeParts) {
  const int64_t experts = 5, width = 37, all = 2 * 11 * 3;
  const Sent s = sent(2, 11, 3, experts, 3, 4);
  const Array weights = Array::random(kF64, {2, 11, 3}, 2), x = Array::random(kF64, {2, 11, width}, 1),
              there = Array::random(kF64, {experts, 2, 3, 4, width}, 3), y(kF64, {2, 11, width}), dots(kF64, {2, 11, 3});
  from_experts(there, weights, s.slots, y);
  choice_dots(there, x, s.slots, dots);
  std::vector<double> sums(static_cast<size_t>(22 * width)), products(static_cast<size_t>(all));
  for (const auto& [first, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 2}, {2, 5}}) {
    const int64_t part = there.view().numel() / experts;
    const Array some(kF64, {end - first, 2, 3, 4, width}), of_some(kF64, {2, 11, width}), dots_of_some(kF64, {2, 11, 3});
    const_cast<Array&>(some).fill([&](int64_t i) { return there.at(first * part + i); });
    from_experts(some, weights, s.slots, of_some, first);
    choice_dots(some, x, s.slots, dots_of_some, first);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_some.at(static_cast<int64_t>(i));
    for (int64_t c = 0; c < all; ++c) {
      const auto slot = static_cast<int64_t>(s.slots.at(c));
      EXPECT_EQ(dots_of_some.at(c), slot >= first * 4 && slot < end * 4 ? dots.at(c) : 0.0) << c;
    }
  }
  EXPECT_LT(scaled_error(y, sums), 4 * epsilon(kF64));
}

// Places beyond a piece, counts inside and at the ends of units, zero counts; rows that are not in use are not read.
TEST(ExpertLinear, OfRowsInUse) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const int64_t places : {1, 31, 100, 600}) {
      const int64_t experts = 3, groups = 2, in = 20, out = 35;
      const Array counts(kI32, {experts, groups});
      const std::vector<int64_t> used = {0, places, 1, std::min<int64_t>(places, 32), std::min<int64_t>(places, 513), places / 2};
      const_cast<Array&>(counts).fill([&](int64_t i) { return static_cast<double>(used[static_cast<size_t>(i)]); });
      Array x = Array::random(d, {experts, groups, places, in}, 1), dy = Array::random(d, {experts, groups, places, out}, 2);
      for (Array* rows : {&x, &dy}) {
        const int64_t cols = rows->view().shape.back();
        for (int64_t i = 0; i < rows->view().numel(); ++i)
          if (i / cols % places >= used[static_cast<size_t>(i / cols / places)]) rows->set(i, 0);
      }
      const Array weight = Array::random(d, {experts, out, in}, 3), y(d, {experts, groups, places, out});
      std::vector<double> want(static_cast<size_t>(y.view().numel())), gradient(static_cast<size_t>(experts * out * in));
      for (int64_t r = 0; r < experts * groups * places; ++r)
        for (int64_t o = 0; o < out; ++o)
          for (int64_t i = 0; i < in; ++i) {
            const int64_t w = (r / groups / places * out + o) * in + i;
            want[r * out + o] += x.at(r * in + i) * weight.at(w);
            gradient[w] += x.at(r * in + i) * dy.at(r * out + o);
          }
      expert_linear(x, weight, View{}, counts, y,
                    Scratch(expert_linear_workspace(without_data(x), without_data(weight), View{}, without_data(counts), y)));
      EXPECT_LT(scaled_error(y, want), 20 * epsilon(d)) << name(d) << places;
      for (const DType sums : {d, d == kF64 ? kF64 : kF32}) {
        const Array dweight(sums, {experts, out, in});
        expert_weight_gradient(dy, x, counts, dweight,
                               Scratch(expert_weight_gradient_workspace(without_data(dy), without_data(x), without_data(counts),
                                                                        dweight)));
        EXPECT_LT(scaled_error(dweight, gradient), 40 * epsilon(d)) << name(d) << places;
      }
    }
}

// Experts in parts: contiguous rows, of which those after the last one in use are left out, and biases only of those in use.
TEST(ExpertLinear, OfExpertsInParts) {
  const int64_t experts = 5, sequences = 2, groups = 3, tokens = 40, k = 3, in = 20, out = 35;
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const int64_t parts : {1, 2, 4, 5})
      for (const int64_t places : {3, 14}) {
        SCOPED_TRACE(str(d, ' ', parts, ' ', places));
        const int64_t room = parts == experts ? places : std::min<int64_t>(14 * k, (experts + parts - 1) / parts * places);
        Array choices(kI64, {sequences, tokens, k});
        choices.fill([&](int64_t i) { return static_cast<double>(((i / 3 * 7 % 11) + i % 3) % experts); });
        const Array slots(kI32, {sequences, tokens, k}), sources(kI32, {parts, sequences, groups, room}), counts(kI32, {experts, sequences, groups});
        route(choices, places, slots, sources, counts);
        const Array x = Array::random(d, {sequences, tokens, in}, 1), weight = Array::random(d, {experts, out, in}, 2),
                    bias = Array::random(d, {experts, out}, 3), dy_of_tokens = Array::random(d, {sequences, tokens, out}, 4);
        const Array rows(d, {parts, sequences, groups, room, in}), y(d, {parts, sequences, groups, room, out}), dy(d, y.view().shape);
        to_experts(x, View{}, slots, sources, rows);
        to_experts(dy_of_tokens, View{}, slots, sources, dy);
        expert_linear(rows, weight, bias, counts, y,
                      Scratch(expert_linear_workspace(without_data(rows), without_data(weight), without_data(bias), without_data(counts), y)));
        const Array dweight(d == kF64 ? kF64 : kF32, {experts, out, in});
        expert_weight_gradient(dy, rows, counts, dweight,
                               Scratch(expert_weight_gradient_workspace(without_data(dy), without_data(rows), without_data(counts), dweight)));
        std::vector<double> want(static_cast<size_t>(y.view().numel()), 0.0), gradient(static_cast<size_t>(experts * out * in), 0.0);
        for (int64_t row = 0; row < rows.view().numel() / in; ++row) {
          const auto source = static_cast<int64_t>(sources.at(row));
          if (source < 0) continue;
          const int64_t group = row / room % groups, sequence = row / room / groups % sequences;
          const int64_t choice = (sequence * tokens + tokens * group / groups) * k + source;
          const auto e = static_cast<int64_t>(choices.at(choice));
          for (int64_t o = 0; o < out; ++o) {
            want[row * out + o] = bias.at(e * out + o);
            for (int64_t i = 0; i < in; ++i) {
              want[row * out + o] += x.at(choice / k * in + i) * weight.at((e * out + o) * in + i);
              gradient[(e * out + o) * in + i] += dy_of_tokens.at(choice / k * out + o) * x.at(choice / k * in + i);
            }
          }
        }
        EXPECT_LT(scaled_error(y, want), 20 * epsilon(d));
        EXPECT_LT(scaled_error(dweight, gradient), 40 * epsilon(d));
        std::vector<double> of_bias(static_cast<size_t>(experts * out), 0.0);
        for (int64_t row = 0; row < rows.view().numel() / in; ++row) {
          const auto source = static_cast<int64_t>(sources.at(row));
          if (source < 0) continue;
          const int64_t group = row / room % groups, sequence = row / room / groups % sequences;
          const auto e = static_cast<int64_t>(choices.at((sequence * tokens + tokens * group / groups) * k + source));
          for (int64_t o = 0; o < out; ++o) of_bias[e * out + o] += dy.at(row * out + o);
        }
        for (const DType sums : {d, d == kF64 ? kF64 : kF32}) {
          const Array dbias(sums, {experts, out});
          expert_bias_gradient(dy, counts, dbias);
          EXPECT_LT(scaled_error(dbias, of_bias), 40 * epsilon(sums));
        }
      }
}

// Counts that no routing gives: rows beyond those of a part are ignored.
TEST(ExpertLinear, CountsOfMoreThanThereIs) {
  const int64_t room = 40, in = 20, out = 35;
  const Array many = Array::of(kI32, {3, 2}, {30, 0, 500, 20, 7, 1 << 30}), fit = Array::of(kI32, {3, 2}, {30, 0, 10, 20, 0, 20});
  const Array x = Array::random(kF32, {1, 2, room, in}, 1), dy = Array::random(kF32, {1, 2, room, out}, 2),
              weight = Array::random(kF32, {3, out, in}, 3);
  const auto results = [&](const Array& counts) {
    const Array y(kF32, {1, 2, room, out}), dweight(kF32, {3, out, in}), dbias(kF32, {3, out});
    expert_linear(x, weight, View{}, counts, y, Scratch(expert_linear_workspace(x, weight, View{}, counts, y)));
    expert_weight_gradient(dy, x, counts, dweight, Scratch(expert_weight_gradient_workspace(dy, x, counts, dweight)));
    expert_bias_gradient(dy, counts, dbias);
    return std::vector<std::vector<double>>{values(y), values(dweight), values(dbias)};
  };
  EXPECT_EQ(results(many), results(fit));
}

// No token was sent to the second expert.
TEST(ExpertLinear, TheGradientOfNoRowsIsZero) {
  const int64_t places = 5, in = 20, out = 35;
  const Array counts = Array::of(kI32, {3, 1}, {5, 0, 2});
  for (DType d : {kF32, kF64, kBF16, kF16}) {
    const Array x = Array::random(d, {3, 1, places, in}, 1),
                dy = Array::random(d, {3, 1, places, out}, 2);
    for (const Shape& strides : {Shape{out * in, in, 1}, Shape{out * in, 1, out}}) {
      const Array dweight(d, {3, out, in}, strides);
      expert_weight_gradient(
          dy, x, counts, dweight,
          Scratch(expert_weight_gradient_workspace(without_data(dy), without_data(x),
                                                   without_data(counts), dweight)));
      std::vector<double> want(static_cast<size_t>(3 * out * in));
      for (int64_t e : {0, 2})
        for (int64_t r = 0; r < static_cast<int64_t>(counts.at(e)); ++r)
          for (int64_t k = 0; k < out * in; ++k)
            want[e * out * in + k] += dy.at((e * places + r) * out + k / in) *
                                      x.at((e * places + r) * in + k % in);
      EXPECT_LT(scaled_error(dweight, want), 4 * epsilon(d)) << name(d);
      for (int64_t k = out * in; k < 2 * out * in; ++k) EXPECT_EQ(dweight.at(k), 0) << name(d);
    }
  }
}

}  // namespace
}  // namespace sheaf::kernels::cpu
