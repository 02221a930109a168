#include "sheaf/kernels/rotary.h"

#include <functional>

#include <gmock/gmock.h>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array rotate(const View& x, int64_t first, bool inverse, const RotaryScaling& scaling = {}) {
  Array y(x.dtype, x.shape);
  const RotaryPart all{x.shape[2], x.shape[3]};
  rotary(x, 10000, scaling, first, all, inverse, y, Scratch(rotary_workspace(without_data(x), all)));
  return y;
}

// By the formula in its source, in three cases by wavelength; "linear" has one case.
double llama3_frequency(double f, const RotaryScaling& s) {
  const double context = static_cast<double>(s.original_context), wavelength = 2 * M_PI / f;
  if (wavelength < context / s.high_freq_factor) return f;
  if (wavelength > context / s.low_freq_factor) return f / s.factor;
  const double smooth =
      (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * f / s.factor + smooth * f;
}

TEST(Rotary, MatchesTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Shape& s :
         {Shape{2, 5, 3, 8}, Shape{1, 200, 2, 64}, Shape{1, 3, 1, 2}, Shape{2, 70, 1, 40}})
      for (int64_t first : {0, 61, 100000}) {
        const Array x = Array::random(d, s, 1);
        std::vector<double> want(s.numel());
        const int64_t half = s[3] / 2;
        for (int64_t row = 0; row < s.numel() / s[3]; ++row)
          for (int64_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(first + row / s[2] % s[1]) *
                                 std::pow(10000.0, -static_cast<double>(i) / half);
            const double a = x.at(row * s[3] + i), b = x.at(row * s[3] + half + i);
            want[row * s[3] + i] = a * std::cos(angle) - b * std::sin(angle);
            want[row * s[3] + half + i] = b * std::cos(angle) + a * std::sin(angle);
          }
        const Array y = rotate(x, first, false);
        EXPECT_LT(scaled_error(y, want), d == kF64 ? 1e-10 : 2 * epsilon(d))
            << name(d) << s.to_string() << first;
        EXPECT_LT(scaled_error(rotate(y, first, true), values(x)),
                  d == kF64 ? 1e-14 : 4 * epsilon(d))
            << name(d) << s.to_string();
      }
}

TEST(Rotary, ScaledFrequenciesMatchTheDefinition) {
  const RotaryScaling llama31 = RotaryScaling::llama3(8), llama32 = RotaryScaling::llama3(32),
                      other = RotaryScaling::llama3(3, 0.5, 20, 1000),
                      linear = RotaryScaling::linear(4);
  for (const RotaryScaling& s : {llama31, llama32, other, linear}) {
    int kept = 0, divided = 0, blended = 0;
    for (int64_t i = 0; i < 64; ++i) {
      const double f = std::pow(500000.0, -static_cast<double>(i) / 64);
      const double want = s == linear ? f / 4 : llama3_frequency(f, s);
      EXPECT_NEAR(s.scaled(f) / want, 1.0, 1e-15) << i;
      (want == f ? kept : want == f / s.factor ? divided : blended) += 1;
    }
    EXPECT_TRUE(s == linear || (kept > 5 && blended > 5)) << kept << ' ' << blended;
    EXPECT_GT(divided, 5);
  }
  for (DType d : {kF32, kF64, kBF16})
    for (const RotaryScaling& s : {RotaryScaling::llama3(8, 1, 4, 100), linear})
      for (int64_t first : {0, 61, 100000}) {
        const Shape shape{2, 70, 2, 16};
        const Array x = Array::random(d, shape, 1);
        std::vector<double> want(shape.numel());
        for (int64_t row = 0; row < shape.numel() / 16; ++row)
          for (int64_t i = 0; i < 8; ++i) {
            const double f = std::pow(10000.0, -static_cast<double>(i) / 8);
            const double angle = static_cast<double>(first + row / 2 % 70) *
                                 (s == linear ? f / 4 : llama3_frequency(f, s));
            const double a = x.at(row * 16 + i), b = x.at(row * 16 + 8 + i);
            want[row * 16 + i] = a * std::cos(angle) - b * std::sin(angle);
            want[row * 16 + 8 + i] = b * std::cos(angle) + a * std::sin(angle);
          }
        const Array y = rotate(x, first, false, s);
        EXPECT_LT(scaled_error(y, want), d == kF64 ? 1e-10 : 2 * epsilon(d)) << name(d) << first;
        EXPECT_LT(scaled_error(rotate(y, first, true, s), values(x)),
                  d == kF64 ? 1e-14 : 4 * epsilon(d))
            << name(d) << first;
      }
}

// EXPECTs heads of 16 elements to be turned by these frequencies, and back by the inverse; the amplitude counts both times.
void expect_turns(const RotaryScaling& scaling, const std::function<double(int64_t)>& frequency) {
  for (DType d : {kF32, kF64, kBF16})
    for (int64_t first : {0, 61, 100000}) {
      const Shape shape{2, 70, 2, 16};
      const Array x = Array::random(d, shape, 1);
      std::vector<double> want(shape.numel()), twice(shape.numel());
      for (int64_t row = 0; row < shape.numel() / 16; ++row)
        for (int64_t i = 0; i < 8; ++i) {
          const double angle = static_cast<double>(first + row / 2 % 70) * frequency(i);
          const double a = x.at(row * 16 + i), b = x.at(row * 16 + 8 + i), c = scaling.amplitude;
          want[row * 16 + i] = c * (a * std::cos(angle) - b * std::sin(angle));
          want[row * 16 + 8 + i] = c * (b * std::cos(angle) + a * std::sin(angle));
          twice[row * 16 + i] = c * c * a, twice[row * 16 + 8 + i] = c * c * b;
        }
      const Array y = rotate(x, first, false, scaling);
      EXPECT_LT(scaled_error(y, want), d == kF64 ? 1e-10 : 2 * epsilon(d)) << name(d) << first;
      EXPECT_LT(scaled_error(rotate(y, first, true, scaling), twice), d == kF64 ? 1e-14 : 4 * epsilon(d)) << name(d) << first;
    }
}

// By the formula in transformers: two ramps, clamped, between dimensions.
TEST(Rotary, YarnMatchesTheDefinition) {
  const auto definition = [](double theta, int64_t width, int64_t i, const RotaryScaling& s,
                             bool truncate) {
    const auto dimension = [&](double turns) {
      return width * std::log(s.original_context / (turns * 2 * M_PI)) / (2 * std::log(theta));
    };
    double low = dimension(s.high_freq_factor), high = dimension(s.low_freq_factor);
    if (truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, width - 1.0);
    if (low == high) high += 0.001;
    const double kept = 1 - std::clamp((i - low) / (high - low), 0.0, 1.0);
    const double f = std::pow(theta, -2.0 * i / width);
    return f / s.factor * (1 - kept) + f * kept;
  };
  for (const bool truncate : {true, false}) {
    const RotaryScaling scaling = RotaryScaling::yarn(4, 2000, 1, 32, truncate);
    EXPECT_NEAR(scaling.amplitude, 0.1 * std::log(4.0) + 1, 1e-15);
    int blended = 0;
    for (int64_t i = 0; i < 64; ++i) {
      const double f = RotaryFrequencies(1e6, 64, scaling)(i),
                   want = definition(1e6, 128, i, scaling, truncate);
      EXPECT_NEAR(f / want, 1.0, 1e-14) << i;
      const double whole = std::pow(1e6, -i / 64.0);
      blended += f < 0.999 * whole && f > 1.001 * whole / 4;
    }
    EXPECT_GT(blended, 5);
    expect_turns(scaling, [&](int64_t i) { return definition(10000, 16, i, scaling, truncate); });
  }
}

// By the formula in transformers, 1 / (factor theta^(2i/d)).
TEST(Rotary, LongropeMatchesTheDefinition) {
  const std::vector<double> short_factors = {1, 1.05, 1.1, 1.3, 1.25, 2, 2.5, 3}, long_factors = {1.02, 1.5, 4, 9, 20.5, 40, 63, 64.75};
  const RotaryScaling scaling = RotaryScaling::longrope(short_factors, long_factors, 32, 4096);
  EXPECT_NEAR(scaling.amplitude, 1.1902380714238083, 1e-15);  // sqrt(1 + 5 ln(2) / (12 ln(2)))
  EXPECT_EQ(RotaryScaling::longrope(short_factors, long_factors, 1, 4096).amplitude, 1.0);
  for (const int64_t context : {1, 4096, 4097}) {
    const RotaryScaling chosen = scaling.for_context(context);
    const std::vector<double>& factors = context > 4096 ? long_factors : short_factors;
    EXPECT_EQ(chosen.problem(8), "");
    expect_turns(chosen, [&](int64_t i) { return 1 / (factors[static_cast<size_t>(i)] * std::pow(10000.0, static_cast<double>(i) / 8)); });
  }
  // Equal lists are the same, wherever they came from.
  EXPECT_TRUE(RotaryScaling::longrope(std::vector(short_factors), std::vector(long_factors), 32, 4096) == scaling);
  EXPECT_FALSE(scaling.for_context(4097) == scaling);
  EXPECT_FALSE(RotaryScaling::longrope(short_factors, short_factors, 32, 4096) == scaling);
  EXPECT_TRUE(RotaryScaling::yarn(8, 100).for_context(1000) == RotaryScaling::yarn(8, 100));
}

TEST(Rotary, ImpossibleFactorsOfPairsAreRefused) {
  const std::vector<double> three = {1, 2, 3};
  const auto problem = [&](const std::vector<double>& short_factors, const std::vector<double>& long_factors, int64_t pairs = 3) {
    return RotaryScaling::longrope(short_factors, long_factors, 4, 64).problem(pairs);
  };
  EXPECT_EQ(problem(three, three), "");
  EXPECT_EQ(problem({}, three), "short_factor has 0 numbers: expected one for each of the 3 pairs of a head's rotated elements");
  EXPECT_EQ(problem(three, {1, 2, 3, 4}), "long_factor has 4 numbers: expected one for each of the 3 pairs of a head's rotated elements");
  EXPECT_EQ(problem(three, three, 4), "short_factor has 3 numbers: expected one for each of the 4 pairs of a head's rotated elements");
  EXPECT_EQ(problem(three, {1, 0, 3}), "long_factor[1] is 0: expected a positive number up to 1000000");
  for (const double bad : {-1.0, 1e7, double{INFINITY}, std::nan("")})
    EXPECT_THAT(problem({1, 2, bad}, three), ::testing::HasSubstr("short_factor[2] is "));
  const std::vector<double> many(129, 1.0);
  EXPECT_EQ(problem(many, many, 129), "short_factor is for at most 128 pairs of a head's rotated elements, which are 129");
  for (const int64_t context : {0, 1}) EXPECT_NE(RotaryScaling::longrope(three, three, 4, context).problem(3), "");
  EXPECT_THROW(rotate(Array(kF32, {1, 2, 1, 8}), 0, false, RotaryScaling::longrope(three, three, 4, 64)), ConfigError);
}

TEST(Rotary, AFactorOfOneChangesNoBit) {
  const Array x = Array::random(kF64, {1, 90, 1, 64}, 1), want = rotate(x, 12345, false);
  for (int64_t context : {0, 50, 64, 8192})
    EXPECT_TRUE(same_bits(rotate(x, 12345, false, RotaryScaling::llama3(1, 1, 4, context)), want));
}

TEST(Rotary, OffsetsStridesAndThreadsChangeNothing) {
  const Shape s{2, 150, 4, 32};
  const Array x = Array::random(kF32, s, 1);
  Array one, two;
  with_threads(1, [&] { one = rotate(x, 3, false); });
  with_threads(2, [&] { two = rotate(x, 3, false); });
  EXPECT_TRUE(same_bits(one, two));
  // Position 100 + 3 alone, as in generation.
  View step = x, expected = one;
  for (View* v : {&step, &expected})
    v->data = v->as<float>() + 100 * v->strides[1], v->shape[1] = 1;
  EXPECT_TRUE(same_bits(rotate(step, 103, false), expected));
  const Array strided = Array::random(kF32, s, 1, 1, {150 * 400, 400, 33, 1});
  EXPECT_TRUE(same_bits(rotate(strided, 3, false), one));
  rotate(Array(kF32, {1, 0, 2, 4}), 0, false);
}

void rotate_part(const View& x, int64_t first, const RotaryPart& part, bool inverse, const View& y,
                 const RotaryScaling& scaling = {}) {
  rotary(x, 10000, scaling, first, part, inverse, y, Scratch(rotary_workspace(without_data(x), part)));
}

TEST(Rotary, OtherHeadsAreCopied) {
  const Array x = Array::random(kF32, {1, 5, 3, 8}, 1), y(kF32, {1, 5, 3, 8}),
              all = rotate(x, 0, false);
  rotate_part(x, 0, {2, 8}, false, y);
  for (int64_t i = 0; i < 120; ++i) EXPECT_EQ(y.at(i), i / 8 % 3 == 2 ? x.at(i) : all.at(i));
}

constexpr struct {
  int64_t width, rotated;
} kParts[] = {{24, 16}, {7, 6}, {9, 2}, {2, 2}, {40, 40}, {192, 64}, {5, 0}};

TEST(Rotary, PartsMatchTheDefinition) {
  const RotaryScaling scaling = RotaryScaling::yarn(4, 2000);
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [width, rotated] : kParts)
      for (const bool neighbours : {false, true})
        for (const int64_t heads : {1, 3})
          for (const int64_t first : {61, 100000}) {
            const Shape s{2, 70, 3, width};
            const RotaryPart part{heads, rotated, neighbours};
            const Array x = Array::random(d, s, 1);
            std::vector<double> want = values(x);
            const RotaryFrequencies frequency(10000, rotated / 2, scaling);
            for (int64_t row = 0; row < s.numel() / width; ++row)
              for (int64_t i = 0; i < rotated / 2 && row % 3 < heads; ++i) {
                const int64_t begin = row * width + width - rotated;
                const int64_t at = begin + (neighbours ? 2 * i : i), other = neighbours ? at + 1 : at + rotated / 2;
                const double angle = static_cast<double>(first + row / 3 % 70) * frequency(i);
                const double c = scaling.amplitude * std::cos(angle), sine = scaling.amplitude * std::sin(angle);
                want[at] = x.at(at) * c - x.at(other) * sine;
                want[other] = x.at(other) * c + x.at(at) * sine;
              }
            const Array y(d, s), back(d, s);
            rotate_part(x, first, part, false, y, scaling);
            const std::string where = str(d, ' ', s, " part ", rotated, neighbours ? " neighbours" : "", " heads ", heads, " from ", first);
            EXPECT_LT(scaled_error(y, want), d == kF64 ? 1e-10 : 2 * epsilon(d)) << where;
            // Elements that are not rotated keep their bits, and the rotated part has the bits of whole heads of its width.
            for (int64_t i = 0; i < s.numel(); ++i)
              if (i / width % 3 >= heads || i % width < width - rotated) {
                ASSERT_EQ(y.at(i), x.at(i)) << where;
              }
            const auto rotated_part = [&, w = width, r = rotated](View v) {
              v.data = v.as<char>() + static_cast<size_t>(w - r) * size_of(d), v.shape[3] = r;
              return v;
            };
            const Array alone(d, rotated_part(x).shape);
            rotate_part(rotated_part(x), first, part, false, alone, scaling);
            EXPECT_TRUE(same_bits(rotated_part(y), alone)) << where;
            // In place, and back.
            const Array in_place = x.clone();
            rotate_part(in_place, first, part, false, in_place, scaling);
            EXPECT_TRUE(same_bits(in_place, y)) << where;
            rotate_part(y, first, part, true, back, scaling);
            std::vector<double> twice = values(x);
            for (int64_t i = 0; i < s.numel(); ++i)
              if (i / width % 3 < heads && i % width >= width - rotated)
                twice[i] *= scaling.amplitude * scaling.amplitude;
            EXPECT_LT(scaled_error(back, twice), d == kF64 ? 1e-14 : 4 * epsilon(d)) << where;
          }
}

TEST(Rotary, PartsHaveTheirBitsWhateverStridesAndThreads) {
  const Shape s{2, 150, 4, 24};
  for (const bool neighbours : {false, true}) {
    const RotaryPart part{3, 16, neighbours};
    const Array x = Array::random(kF32, s, 1), one(kF32, s), two(kF32, s);
    with_threads(1, [&] { rotate_part(x, 3, part, false, one); });
    with_threads(2, [&] { rotate_part(x, 3, part, false, two); });
    EXPECT_TRUE(same_bits(one, two));
    const Shape strides{150 * 400, 400, 33, 1};
    const Array from = Array::random(kF32, s, 1, 1, strides), to(kF32, s, strides);
    rotate_part(from, 3, part, false, to);
    EXPECT_TRUE(same_bits(to, one));
  }
}

// Fewer tokens than get a table of fine angles, and more; rows that begin anywhere.
TEST(Rotary, APositionHasItsBitsWhereverTheTokenLies) {
  constexpr int64_t kTokens = 150;
  const Shape s{1, kTokens, 3, 24};
  const RotaryScaling scaling = RotaryScaling::yarn(8, 100);
  const auto rows_of = [&](const View& x, int64_t b, int64_t first, int64_t count) {
    View part = x;
    part.data = x.as<float>() + b * x.strides[0] + first * x.strides[1];
    part.shape[0] = 1, part.shape[1] = count;
    return part;
  };
  const Array x = Array::random(kF32, s, 1), all = rotate(x, 7, false, scaling);
  for (const int64_t count : {1, 2, 63, 64, 65, 140})
    for (const int64_t first : {0, 5, 10}) {
      const Array some = rotate(rows_of(x, 0, first, count), 7 + first, false, scaling);
      EXPECT_TRUE(same_bits(some, rows_of(all, 0, first, count))) << count << " from " << first;
    }
  for (const int64_t count : {1, 20, 64, 100}) {  // of three rows
    const int64_t starts[] = {0, 3, 41};
    Array begins(kI32, {3, count}), rows(kF32, {3, count, 3, 24}), got(kF32, {3, count, 3, 24});
    for (int64_t i = 0; i < 3 * count; ++i) begins.set(i, static_cast<double>(starts[i / count]));
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t i = 0; i < count * 72; ++i) rows.set(b * count * 72 + i, x.at(i));
    const RotaryPart part{3, 24};
    const RotaryPositions positions(41 + 7, begins);
    rotary(rows, 10000, scaling, positions, part, false, got, Scratch(rotary_workspace(without_data(rows), part, positions)));
    for (int64_t b = 0; b < 3; ++b) {
      const Array alone = rotate(rows_of(x, 0, 0, count), 41 + 7 - starts[b], false, scaling);
      EXPECT_TRUE(same_bits(rows_of(got, b, 0, count), alone)) << count << " tokens of row " << b;
    }
  }
}

TEST(Rotary, RefusesTokensBeforeTheirRow) {
  const Array x = Array::random(kF32, {2, 2, 1, 4}, 1), y(kF32, {2, 2, 1, 4}), begins = Array::of(kI32, {2, 2}, {0, 0, 4, 0});
  try {
    rotary(x, 10000, {}, {3, begins}, {1, 4}, false, y, Scratch(1 << 20));
    ADD_FAILURE();
  } catch (const DataError& e) {
    EXPECT_STREQ(e.what(), "[rotary] token 0 of row 1 stands before the row begins");
  }
  EXPECT_THROW(rotary(x, 10000, {}, {3, Array(kI32, {2, 1})}, {1, 4}, false, y, Scratch(1 << 20)), ShapeError);
  EXPECT_THROW(rotary(x, 10000, {}, {3, Array(kF32, {2, 2})}, {1, 4}, false, y, Scratch(1 << 20)), DTypeError);
}

TEST(Rotary, RefusesWidthsThatCannotBeRotated) {
  EXPECT_THROW(rotate(Array(kF32, {1, 2, 1, 3}), 0, false), ShapeError);
  const Array x = Array::random(kF32, {1, 2, 1, 8}, 1), y(kF32, {1, 2, 1, 8});
  for (const int64_t width : {-2, 3, 7, 10})
    try {
      rotary(x, 10000, {}, 0, {1, width}, false, y, Scratch(1 << 20));
      ADD_FAILURE() << width;
    } catch (const ShapeError& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr(str("cannot rotate ", width, " elements")));
    }
  EXPECT_THROW(rotary(x, 10000, {}, 0, {1, 4}, false, Array(kF32, {1, 2, 1, 4}), Scratch(1 << 20)), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
