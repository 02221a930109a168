#include "sheaf/kernels/rotary.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array rotate(const View& x, int64_t first, bool inverse, const RotaryScaling& scaling = {}) {
  Array y(x.dtype, x.shape);
  rotary(x, 10000, scaling, first, x.shape[2], inverse, y,
         Scratch(rotary_workspace(without_data(x))));
  return y;
}

// As its source states it, in three cases by the wavelength; "linear" has one.
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

// As transformers states it: two ramps, cut off, between dimensions.
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
    for (DType d : {kF32, kF64, kBF16})
      for (int64_t first : {0, 61, 100000}) {
        const Shape shape{2, 70, 2, 16};
        const Array x = Array::random(d, shape, 1);
        std::vector<double> want(shape.numel()), twice(shape.numel());
        for (int64_t row = 0; row < shape.numel() / 16; ++row)
          for (int64_t i = 0; i < 8; ++i) {
            const double angle = static_cast<double>(first + row / 2 % 70) *
                                 definition(10000, 16, i, scaling, truncate);
            const double a = x.at(row * 16 + i), b = x.at(row * 16 + 8 + i), c = scaling.amplitude;
            want[row * 16 + i] = c * (a * std::cos(angle) - b * std::sin(angle));
            want[row * 16 + 8 + i] = c * (b * std::cos(angle) + a * std::sin(angle));
            twice[row * 16 + i] = c * c * a, twice[row * 16 + 8 + i] = c * c * b;
          }
        const Array y = rotate(x, first, false, scaling);
        EXPECT_LT(scaled_error(y, want), d == kF64 ? 1e-10 : 2 * epsilon(d)) << name(d) << first;
        EXPECT_LT(scaled_error(rotate(y, first, true, scaling), twice),
                  d == kF64 ? 1e-14 : 4 * epsilon(d))
            << name(d) << first;
      }
  }
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
  // Position 100 + 3 alone, as generation asks for it.
  View step = x, expected = one;
  for (View* v : {&step, &expected})
    v->data = v->as<float>() + 100 * v->strides[1], v->shape[1] = 1;
  EXPECT_TRUE(same_bits(rotate(step, 103, false), expected));
  const Array strided = Array::random(kF32, s, 1, 1, {150 * 400, 400, 33, 1});
  EXPECT_TRUE(same_bits(rotate(strided, 3, false), one));
  rotate(Array(kF32, {1, 0, 2, 4}), 0, false);
}

TEST(Rotary, OtherHeadsAreCopied) {
  const Array x = Array::random(kF32, {1, 5, 3, 8}, 1), y(kF32, {1, 5, 3, 8}),
              all = rotate(x, 0, false);
  rotary(x, 10000, {}, 0, 2, false, y, Scratch(rotary_workspace(x)));
  for (int64_t i = 0; i < 120; ++i) EXPECT_EQ(y.at(i), i / 8 % 3 == 2 ? x.at(i) : all.at(i));
}

TEST(Rotary, RefusesOddWidths) {
  EXPECT_THROW(rotate(Array(kF32, {1, 2, 1, 3}), 0, false), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
