// Tests the emulation of matrix tiles itself; part of every test that is linked with it, so that none passes without tiles.
#include "sheaf/tests/kernels/emulated_tiles.h"

#include <csignal>
#include <vector>

#include <gtest/gtest.h>
#include <immintrin.h>

#include "sheaf/core/dtype.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"

namespace sheaf::testing {
namespace {

#define SHEAF_TILES [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]]

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

SHEAF_TILES void load(const Config& config) {
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

/// c += a b in tiles 0, 1 and 2.
SHEAF_TILES void multiply(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* c, int64_t c_stride) {
  __asm__ volatile("" ::: "memory");
  _tile_loadd(0, c, c_stride);
  _tile_loadd(1, a, a_stride);
  _tile_stream_loadd(2, b, b_stride);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, c_stride);
  __asm__ volatile("" ::: "memory");
}

SHEAF_TILES void zero_and_store(void* to, int64_t stride) {
  __asm__ volatile("" ::: "memory");
  _tile_zero(5);
  _tile_stored(5, to, stride);
  __asm__ volatile("" ::: "memory");
}

SHEAF_TILES void release() { _tile_release(); }

class EmulatedTiles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::cpu::dot::available()) GTEST_SKIP() << "this CPU lacks AVX512_BF16, which tiles are used with";
    ASSERT_TRUE(kernels::cpu::amx::available());
  }
};

/// Tiles of 5 x 12, 12 x 7 and 5 x 7, with gaps between their rows.
TEST_F(EmulatedTiles, MultiplyPairs) {
  constexpr int kRows = 5, kDepth = 12, kCols = 7, kStride = 48;
  Config config;
  config.rows[0] = config.rows[1] = kRows, config.rows[2] = kDepth / 2;
  config.bytes_per_row[0] = config.bytes_per_row[2] = kCols * 4, config.bytes_per_row[1] = kDepth * 2;
  config.rows[5] = 2, config.bytes_per_row[5] = 8;
  std::vector<bf16> a(kRows * kStride / 2), b(kDepth / 2 * kStride / 2);
  std::vector<float> c(kRows * kStride / 4);
  const auto at = [](int i, int j) { return static_cast<float>((7 * i + 5 * j) % 13 - 6); };  // exact in bf16
  for (int i = 0; i < kRows; ++i)
    for (int k = 0; k < kDepth; ++k) a[static_cast<size_t>(i * kStride / 2 + k)] = bf16(at(i, k));
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < kCols; ++j) b[static_cast<size_t>(k / 2 * kStride / 2 + 2 * j + k % 2)] = bf16(at(j, k + 3));
  for (size_t n = 0; n < c.size(); ++n) c[n] = static_cast<float>(n);

  const int64_t before = emulated_tile_instructions();
  load(config);
  multiply(a.data(), kStride, b.data(), kStride, c.data(), kStride);
  float zeros[2][3] = {{1, 2, 3}, {4, 5, 6}};
  zero_and_store(zeros, sizeof zeros[0]);
  release();
  const int64_t emulated = emulated_tile_instructions() - before;
  EXPECT_TRUE(emulated == 0 || emulated == 9) << emulated;  // 0: executed by the machine itself

  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kStride / 4; ++j) {
      const int n = i * kStride / 4 + j;
      float expected = static_cast<float>(n);
      for (int k = 0; j < kCols && k < kDepth; ++k) expected += at(i, k) * at(j, k + 3);
      EXPECT_EQ(c[static_cast<size_t>(n)], expected) << i << ", " << j;
    }
  EXPECT_EQ(zeros[1][1], 0);
  EXPECT_EQ(zeros[1][2], 6);
}

using EmulatedTilesDeathTest = EmulatedTiles;

TEST_F(EmulatedTilesDeathTest, RefuseWhatMachinesRefuse) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  alignas(64) static float memory[16][16];
  const auto multiply_memory = [] { multiply(memory, 64, memory, 64, memory, 64); };
  EXPECT_EXIT(multiply_memory(), ::testing::KilledBySignal(SIGILL), "") << "without a configuration";
  Config config;
  for (int t = 0; t < 3; ++t) config.rows[t] = 16, config.bytes_per_row[t] = 64;
  EXPECT_EXIT((load(config), release(), multiply_memory()), ::testing::KilledBySignal(SIGILL), "") << "released";
  Config uneven = config;
  uneven.rows[2] = 15;
  EXPECT_EXIT((load(uneven), multiply_memory()), ::testing::KilledBySignal(SIGILL), "") << "depths differ";
  EXPECT_EXIT((load(config), zero_and_store(memory, 64)), ::testing::KilledBySignal(SIGILL), "") << "tile 5";
}

}  // namespace
}  // namespace sheaf::testing
