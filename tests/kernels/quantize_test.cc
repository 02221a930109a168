#include "sheaf/kernels/quantize.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "sheaf/kernels/cpu/block_values.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

constexpr BlockFormat kFormats[] = {BlockFormat::int8, BlockFormat::nf4};

std::vector<float> normals(int64_t blocks, int seed, double scale = 1) {
  const Array a = Array::random(kF32, {blocks * kBlockSize}, seed, scale);
  const auto* data = a.view().as<float>();
  return {data, data + a.view().numel()};
}

std::vector<uint8_t> blocks_of(std::span<const float> values, BlockFormat format) {
  std::vector<uint8_t> out(values.size() / kBlockSize * block_bytes(format));
  EXPECT_TRUE(quantize(values, format, out.data()));
  return out;
}

template <class T = float>
std::vector<T> values_of(const std::vector<uint8_t>& blocks, BlockFormat format) {
  const auto bytes = std::ssize(blocks);
  std::vector<T> out(blocks.size() / block_bytes(format) * kBlockSize);
  dequantize(View::dense(const_cast<uint8_t*>(blocks.data()), kU8, {bytes}), format,
             View::dense(out.data(), dtype_of<T>, {std::ssize(out)}));
  return out;
}

// The level whose value is nearest, of all levels.
float nearest(float value, BlockFormat format, float scale) {
  float best = 0, distance = std::numeric_limits<float>::infinity();
  const auto look_at = [&](float level) {
    if (std::abs(level * scale - value) < distance) distance = std::abs(level * scale - value), best = level * scale;
  };
  if (format == BlockFormat::nf4) std::ranges::for_each(kNf4Levels, look_at);
  else for (int code = -127; code <= 127; ++code) look_at(static_cast<float>(code));
  return best;
}

TEST(Quantize, TakesTheNearestOfItsLevels) {
  for (const BlockFormat format : kFormats)
    for (const double size : {1e-6, 0.02, 3e4}) {
      const std::vector<float> values = normals(37, 1, size);
      const std::vector<float> back = values_of(blocks_of(values, format), format);
      for (size_t i = 0; i < values.size(); ++i) {
        float largest = 0;
        for (size_t k = 0; k < kBlockSize; ++k) largest = std::max(largest, std::abs(values[i / kBlockSize * kBlockSize + k]));
        const auto scale = static_cast<float>(bf16(format == BlockFormat::int8 ? largest / 127 : largest));
        const float want = nearest(values[i], format, scale);
        ASSERT_NEAR(back[i], want, scale * 1e-6) << name(format) << " of " << values[i] << ", scale " << scale;
      }
    }
}

// Codes and scales by hand, so that the bytes in files never change.
TEST(Quantize, LaysBlocksOutAsTheFormatSays) {
  std::vector<float> values(kBlockSize, 0.0f);
  values[0] = 127, values[1] = -127, values[2] = 3.4f, values[3] = -0.5f, values[63] = 1;
  const std::vector<uint8_t> eights = blocks_of(values, BlockFormat::int8);
  ASSERT_EQ(eights.size(), 66u);
  EXPECT_THAT(std::vector<int>(eights.begin(), eights.begin() + 6), ::testing::ElementsAre(0x80, 0x3f, 127, 129, 3, 0));
  EXPECT_EQ(eights[2 + 63], 1);
  std::ranges::fill(values, 0.0f);
  values[0] = 2, values[1] = -2, values[32] = 2 * kNf4Levels[12], values[33] = 2 * kNf4Levels[3];
  const std::vector<uint8_t> fours = blocks_of(values, BlockFormat::nf4);
  ASSERT_EQ(fours.size(), 34u);
  EXPECT_THAT(std::vector<int>(fours.begin(), fours.begin() + 5), ::testing::ElementsAre(0x00, 0x40, 0xcf, 0x30, 0x77));
}

TEST(Quantize, BlocksOfTheirOwnValuesAreTheSame) {
  for (const BlockFormat format : kFormats)
    for (const double size : {1e-30, 0.02, 1e30}) {
      const std::vector<uint8_t> blocks = blocks_of(normals(1000, 2, size), format);
      EXPECT_EQ(blocks_of(values_of(blocks, format), format), blocks) << name(format) << " " << size;
    }
}

TEST(Quantize, ErrorsAreThoseOfTheirBits) {
  const std::vector<float> values = normals(2000, 3);
  for (const BlockFormat format : kFormats) {
    const std::vector<float> back = values_of(blocks_of(values, format), format);
    double square = 0;
    for (size_t i = 0; i < values.size(); ++i) square += std::pow(back[i] - values[i], 2);
    const double error = std::sqrt(square / static_cast<double>(values.size()));
    // The largest of 64 normal values is about 2.5: steps of 2.5 / 127 have an rms error of 1/sqrt(12) of a step.
    EXPECT_NEAR(error, format == BlockFormat::int8 ? 2.5 / 127 / std::sqrt(12) : 0.09, format == BlockFormat::int8 ? 5e-4 : 0.01);
  }
}

TEST(Quantize, NothingIsZeroAndWhatIsNotFiniteIsSaid) {
  for (const BlockFormat format : kFormats) {
    std::vector<float> values(2 * kBlockSize, 0.0f);
    EXPECT_THAT(values_of(blocks_of(values, format), format), ::testing::Each(0.0f));
    std::vector<uint8_t> blocks(2 * static_cast<size_t>(block_bytes(format)));
    for (const float bad : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
      values[100] = bad;
      EXPECT_FALSE(quantize(values, format, blocks.data()));
    }
    values[100] = std::numeric_limits<float>::denorm_min();
    EXPECT_TRUE(quantize(values, format, blocks.data()));
    values[100] = std::numeric_limits<float>::max();
    EXPECT_TRUE(quantize(values, format, blocks.data()));
    EXPECT_THAT(values_of(blocks, format), ::testing::Each(::testing::Truly([](float x) { return !std::isnan(x); })));
  }
  EXPECT_THROW(quantize(std::vector<float>(65), BlockFormat::int8, nullptr), ShapeError);
}

// The quantiles of a normal distribution that the paper's appendix E gives, and 0.
TEST(Quantize, Nf4LevelsAreQuantiles) {
  const auto quantile = [](double p) {  // of a normal distribution, by bisection
    double low = -10, high = 10;
    for (int i = 0; i < 200; ++i) {
      const double mid = (low + high) / 2;
      (0.5 * std::erfc(-mid / std::sqrt(2.0)) < p ? low : high) = mid;
    }
    return low;
  };
  const double offset = 0.9677083, largest = quantile(offset);
  std::vector<double> want = {0};
  for (int i = 0; i < 8; ++i) want.push_back(quantile(offset + (0.5 - offset) * i / 8) / largest);
  for (int i = 0; i < 7; ++i) want.push_back(-quantile(offset + (0.5 - offset) * i / 7) / largest);
  std::ranges::sort(want);
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(kNf4Levels[static_cast<size_t>(i)], want[static_cast<size_t>(i)], 2e-6) << i;
}

TEST(Dequantize, RoundsOnceToEachType) {
  for (const BlockFormat format : kFormats) {
    const std::vector<uint8_t> blocks = blocks_of(normals(700, 4, 0.3), format);
    const std::vector<float> want = values_of(blocks, format);
    const auto wide = values_of<double>(blocks, format);
    const auto narrow = values_of<bf16>(blocks, format);
    const auto half = values_of<f16>(blocks, format);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(wide[i], want[i]);
      ASSERT_EQ(narrow[i].bits, bf16(want[i]).bits);
      ASSERT_EQ(half[i].bits, f16(want[i]).bits);
    }
  }
}

TEST(Dequantize, RefusesWhatIsNoBlocks) {
  std::vector<uint8_t> bytes(66);
  std::vector<float> out(64);
  const View to = View::dense(out.data(), kF32, {64});
  EXPECT_THROW(dequantize(View::dense(bytes.data(), kI8, {66}), BlockFormat::int8, to), DTypeError);
  EXPECT_THROW(dequantize(View::dense(bytes.data(), kU8, {66}), BlockFormat::nf4, to), ShapeError) << "one and some bytes";
  EXPECT_THROW(dequantize(View::dense(bytes.data(), kU8, {66}), BlockFormat::int8, View::dense(out.data(), kF32, {32})), ShapeError);
  EXPECT_THROW(dequantize(View::dense(bytes.data(), kU8, {66}), BlockFormat::int8, View::dense(out.data(), kI32, {64})), DTypeError);
}

std::vector<uint8_t> blocks_by_chance(const std::vector<float>& values, std::optional<uint32_t> key) {
  std::vector<uint8_t> out(values.size() / kBlockSize * 66);
  to_int8_blocks(View::dense(const_cast<float*>(values.data()), kF32, {std::ssize(values)}), key,
                     View::dense(out.data(), kU8, {std::ssize(out)}));
  return out;
}

TEST(ToInt8Blocks, TakesOneOfTheTwoNeighboursAndTheirMeanIsTheValue) {
  const int64_t kDraws = 4000;
  const std::vector<float> values = normals(3, 5, 0.02);
  std::vector<double> mean(values.size());
  std::vector<float> scales;
  for (uint32_t key = 0; key < kDraws; ++key) {
    const std::vector<uint8_t> blocks = blocks_by_chance(values, key * 0x9e3779b9u);
    const std::vector<float> back = values_of(blocks, BlockFormat::int8);
    for (size_t i = 0; i < values.size(); ++i) {
      const float scale = block_scale(&blocks[i / kBlockSize * 66]);
      ASSERT_LE(std::abs(back[i] - values[i]), scale * 1.00002f) << values[i];
      mean[i] += back[i] / static_cast<double>(kDraws);
      if (key == 0) scales.push_back(scale);
    }
  }
  // The standard deviation of each draw is at most half a step; the tolerance is 5 of those of the mean.
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(mean[i], values[i], 5 * 0.5 * scales[i] / std::sqrt(static_cast<double>(kDraws))) << i;
}

TEST(ToInt8Blocks, TakesTheNearestWithoutAKey) {
  const std::vector<float> values = normals(300, 6, 0.02);
  const std::vector<uint8_t> blocks = blocks_by_chance(values, std::nullopt);
  const std::vector<float> back = values_of(blocks, BlockFormat::int8);
  for (size_t i = 0; i < values.size(); ++i) {
    const float scale = block_scale(&blocks[i / kBlockSize * 66]);
    ASSERT_NEAR(back[i], nearest(values[i], BlockFormat::int8, scale), scale * 3e-5) << values[i];
  }
}

// Multiples of the scale are exact, whatever the noise; nothing is clipped.
TEST(ToInt8Blocks, IsExactWhereCodesAre) {
  std::vector<float> values(kBlockSize);
  for (int i = 0; i < kBlockSize; ++i) values[static_cast<size_t>(i)] = static_cast<float>(4 * i - 127) * 0x1p-9f;
  for (uint32_t key = 0; key < 1000; ++key)
    ASSERT_EQ(values_of(blocks_by_chance(values, noise_by_chance(1, 2, 3, key)), BlockFormat::int8), values);
  for (const float largest : {1.0f, 1.003f, 0.7f, 3e38f, 1e-27f}) {
    std::ranges::fill(values, largest);
    for (const float x : values_of(blocks_by_chance(values, 7), BlockFormat::int8)) EXPECT_NEAR(x, largest, largest / 126);
  }
}

// The bytes, so that all devices and instruction sets round alike.
TEST(ToInt8Blocks, DrawsTheSameEverywhere) {
  std::vector<float> values(kBlockSize);
  for (int i = 0; i < kBlockSize; ++i) values[static_cast<size_t>(i)] = 0.01f * static_cast<float>(i) - 0.3f;
  const std::vector<uint8_t> blocks = blocks_by_chance(values, 3);
  std::vector<int> codes;
  for (size_t i = 0; i < 66; i += 6) codes.push_back(blocks[i]);
  EXPECT_THAT(codes, ::testing::ElementsAre(43, 157, 179, 202, 226, 249, 15, 38, 61, 84, 107));
}

TEST(ToInt8Blocks, EqualValuesErrApart) {
  std::vector<float> uneven(2 * kBlockSize, 0.3f);
  uneven[0] = 1, uneven[64] = 0.9999f;
  std::vector<float> back = values_of(blocks_by_chance(uneven, 1), BlockFormat::int8);
  EXPECT_NE(std::vector<float>(back.begin() + 1, back.begin() + 64), std::vector<float>(back.begin() + 65, back.end())) << "blocks";
  EXPECT_NE(back, values_of(blocks_by_chance(uneven, 2), BlockFormat::int8)) << "keys";
  std::vector<float> of_one(back.begin(), back.begin() + 64);
  std::ranges::sort(of_one);
  EXPECT_EQ(std::unique(of_one.begin(), of_one.end()) - of_one.begin(), 3) << "the largest, and the two codes next to the others";
  std::rotate(uneven.begin(), uneven.begin() + 64, uneven.end());
  std::rotate(back.begin(), back.begin() + 64, back.end());
  EXPECT_EQ(back, values_of(blocks_by_chance(uneven, 1), BlockFormat::int8)) << "a block is the same wherever it lies";
}

TEST(ToInt8Blocks, NothingIsZeroAndWhatIsNotFiniteIsNan) {
  std::vector<float> values(3 * kBlockSize, 0.0f);
  values[70] = 1e-29f;  // less than 2^-100 · 127
  EXPECT_THAT(values_of(blocks_by_chance(values, 1), BlockFormat::int8), ::testing::Each(0.0f));
  values[2] = 1e-39f;
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    values[100] = bad, values[150] = 1;
    const std::vector<float> back = values_of(blocks_by_chance(values, 1), BlockFormat::int8);
    for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(std::isnan(back[i]), i / kBlockSize == 1) << i;
    EXPECT_NEAR(back[150], 1, 0.01);
  }
}

TEST(SumOfBlocks, AddsInTheOrderOfParts) {
  for (const int64_t parts : {1, 2, 3, 5}) {
    const int64_t blocks = 700;
    std::vector<uint8_t> all;
    std::vector<float> want;
    for (int64_t p = 0; p < parts; ++p) {
      const std::vector<uint8_t> mine = blocks_by_chance(normals(blocks, static_cast<int>(10 + p)), 1);
      all.insert(all.end(), mine.begin(), mine.end());
      std::vector<float> values = values_of(mine, BlockFormat::int8);
      for (size_t i = 0; i < values.size() && p > 0; ++i) {
        const float scale = block_scale(&mine[i / kBlockSize * 66]);
        values[i] = std::fma(static_cast<float>(static_cast<int8_t>(mine[i / kBlockSize * 66 + 2 + i % kBlockSize])), scale, want[i]);
      }
      want = values;
    }
    const View from = View::dense(all.data(), kU8, {std::ssize(all)});
    std::vector<float> out(static_cast<size_t>(blocks * kBlockSize));
    sum_of_blocks(from, parts, View::dense(out.data(), kF32, {std::ssize(out)}));
    EXPECT_EQ(out, want) << parts;
    std::vector<double> wide(out.size());
    sum_of_blocks(from, parts, View::dense(wide.data(), kF64, {std::ssize(wide)}));
    EXPECT_TRUE(std::equal(wide.begin(), wide.end(), want.begin()));
    std::vector<bf16> narrow(out.size());
    sum_of_blocks(from, parts, View::dense(narrow.data(), kBF16, {std::ssize(narrow)}));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(narrow[i].bits, bf16(want[i]).bits);
  }
}

TEST(SumOfBlocks, RefusesWhatDoesNotFit) {
  std::vector<uint8_t> bytes(132);
  std::vector<float> values(128);
  const View two = View::dense(values.data(), kF32, {128}), one = View::dense(values.data(), kF32, {64});
  EXPECT_THROW(sum_of_blocks(View::dense(bytes.data(), kU8, {132}), 2, two), ShapeError);
  EXPECT_THROW(sum_of_blocks(View::dense(bytes.data(), kI8, {132}), 2, one), DTypeError);
  EXPECT_THROW(to_int8_blocks(one, 0, View::dense(bytes.data(), kU8, {132})), ShapeError);
  EXPECT_THROW(to_int8_blocks(View::dense(values.data(), kF32, {32}), 0, View::dense(bytes.data(), kU8, {33})), ShapeError);
  EXPECT_THROW(to_int8_blocks(View::dense(values.data(), kI32, {64}), 0, View::dense(bytes.data(), kU8, {66})), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
