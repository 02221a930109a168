#include "sheaf/kernels/random.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/tests/kernels/views.h"

namespace sheaf {
namespace {
namespace cpu = kernels::cpu;
using kernels::GlobalIndex;
using test::Buffer;

// Random123's kat_vectors for philox4x32, 10 rounds.
TEST(Philox, PublishedVectors) {
  struct Case {
    philox::Block counter;
    uint32_t key0, key1;
    uint32_t want[4];
  };
  const Case cases[] = {
      {{{0, 0, 0, 0}}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Case& c : cases) {
    const philox::Block b = philox::block(c.counter, c.key0, c.key1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(b.word[i], c.want[i]);
  }
}

TEST(Key, NamesAndSeedsAreStreamsOfTheirOwn) {
  EXPECT_EQ(key_of("wte", 1), key_of("wte", 1));
  EXPECT_NE(key_of("wte", 1), key_of("wte", 2));
  EXPECT_NE(key_of("wte", 1), key_of("wpe", 1));
  EXPECT_NE(fold_in(key_of("x", 1), 0), key_of("x", 1));
  EXPECT_NE(fold_in({1}, 2), fold_in({2}, 1));
  // Weights are reproducible across versions only if these bits never change.
  EXPECT_EQ(key_of("wte", 1337).value, 1819139487431070282ull);
}

TEST(Quantile, AgreesWithErfc) {
  for (double p = 1e-15; p < 1; p = p < 0.4 ? p * 1.7 : p + 0.013) {
    const double x = normal_quantile(p);
    const double q = 0.5 * std::erfc(-x / std::sqrt(2.0)),
                 density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    EXPECT_NEAR(x, x - (q - p) / density, 4e-15 * std::max(1.0, std::abs(x))) << p;
    EXPECT_NEAR(detail::portable_log(p), std::log(p), 3e-16 * std::abs(std::log(p)) + 1e-18);
  }
  EXPECT_EQ(normal_quantile(0.5), 0);
  EXPECT_TRUE(std::isfinite(normal_from(0)) && std::isfinite(normal_from(~0ull)));
  EXPECT_EQ(normal_from(0), -normal_from(~0ull));
}

TEST(Normal, Moments) {
  Buffer x(kF32, {1000000});
  cpu::normal(x.view(), key_of("moments", 3), GlobalIndex::whole(x.view().shape), 0, 1);
  double m[5] = {};
  int64_t beyond2 = 0;
  for (const double v : x.values()) {
    for (int k = 1; k < 5; ++k) m[k] += std::pow(v, k) / 1e6;
    beyond2 += std::abs(v) > 2;
  }
  EXPECT_NEAR(m[1], 0, 5e-3);
  EXPECT_NEAR(m[2], 1, 8e-3);
  EXPECT_NEAR(m[3], 0, 2e-2);
  EXPECT_NEAR(m[4], 3, 6e-2);
  EXPECT_NEAR(double(beyond2) / 1e6, 0.0455, 1.2e-3);
}

TEST(Random, EveryElementIsAFunctionOfItsGlobalIndex) {
  const Shape global{7, 5, 300};
  const Key key = key_of("w", 11);
  Buffer whole(kF32, global);
  for (const bool gaussian : {false, true}) {
    auto draw = [&](const View& v, const GlobalIndex& where) {
      gaussian ? cpu::normal(v, key, where, 0.5, 0.02) : cpu::uniform(v, key, where, -1, 3);
    };
    draw(whole.view(), GlobalIndex::whole(global));
    for (int64_t i = 0; i < 40; ++i) {  // and that function is the scalar one
      const uint64_t at = static_cast<uint64_t>(i);
      EXPECT_EQ(whole.get(i),
                gaussian ? static_cast<float>(0.5 + 0.02 * normal_from(random_u64(key, at)))
                         : static_cast<float>(-1 + 4.0 * uniform_from(random_u32(key, at))));
    }
    RankContext context;
    context.threads = 3;
    RankScope scope(context);
    const std::pair<Shape, Shape> blocks[] = {{{2, 5, 300}, {3, 0, 0}},
                                              {{7, 2, 300}, {0, 3, 0}},
                                              {{7, 5, 33}, {0, 0, 101}},
                                              {{1, 1, 1}, {6, 4, 299}},
                                              {{0, 5, 300}, {7, 0, 0}}};
    for (const auto& [shape, start] : blocks) {
      Buffer part(kF32, shape, {2, 0, 1});
      draw(part.view(), {global, start});
      for (int64_t i = 0; i < part.numel(); ++i) {
        const int64_t a = i / (shape[1] * shape[2]) + start[0],
                      b = i / shape[2] % shape[1] + start[1];
        const int64_t c = i % shape[2] + start[2];
        ASSERT_EQ(part.get(i), whole.get((a * 5 + b) * 300 + c));
      }
    }
    for (const int64_t begin : {1, 2, 3, 4095, 9000}) {  // a flat shard
      Buffer part(kF32, {1500});
      draw(part.view(), {{global.numel()}, {begin}});
      for (int64_t i = 0; i < 1500; ++i) ASSERT_EQ(part.get(i), whole.get(begin + i));
    }
  }
}

TEST(Uniform, CoversTheInterval) {
  Buffer x(kF64, {100000});
  cpu::uniform(x.view(), Key{5}, GlobalIndex::whole({100000}), 2, 6);
  double mean = 0;
  for (const double v : x.values()) {
    ASSERT_TRUE(v >= 2 && v < 6);
    mean += v / 1e5;
  }
  EXPECT_NEAR(mean, 4, 0.02);
}

TEST(Dropout, KeepsTheMeanAndMasksTheGradientAlike) {
  const Shape shape{500, 400};
  Buffer x(kF32, shape, {1, 0}), y(kF32, shape), dy(kF32, shape), dx(kF32, shape);
  x.random(1, 1, 2), dy.random(2, 1, 2);
  const GlobalIndex where{{900, 400}, {100, 0}};
  cpu::dropout(x.view(), 0.3, Key{42}, where, y.view());
  cpu::dropout(dy.view(), 0.3, Key{42}, where, dx.view());
  int64_t kept = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (y.get(i) != 0) {
      ++kept;
      ASSERT_EQ(y.get(i), static_cast<float>(x.get(i)) * static_cast<float>(1 / 0.7));
      ASSERT_EQ(dx.get(i), static_cast<float>(dy.get(i)) * static_cast<float>(1 / 0.7));
    } else {
      ASSERT_EQ(dx.get(i), 0);
    }
  }
  EXPECT_NEAR(double(kept) / double(x.numel()), 0.7, 0.005);
  cpu::dropout(x.view(), 0, Key{42}, where, y.view());
  EXPECT_EQ(x.values(), y.values());
  EXPECT_THROW(cpu::dropout(x.view(), 1, Key{42}, where, y.view()), ConfigError);
  EXPECT_THROW(cpu::dropout(x.view(), 0.5, Key{42}, {{900, 400}, {100, 1}}, y.view()), ShapeError);
}

TEST(Dropout, EveryElementIsAFunctionOfItsGlobalIndex) {
  const Key key = key_of("drop", 5);
  const int64_t n = 70001;
  RankContext context;
  context.threads = 3;
  RankScope scope(context);
  for (const DType dtype : {kF32, kF64, kBF16, kF16})
    for (const double p : {0.0, 0.3, 1 - 0x1p-40})
      for (const int64_t begin : {0, 1, 2, 3, 4095}) {  // dense and not
        Buffer x(dtype, {n}, {0}, begin == 2), y(dtype, {n}, {0}, begin == 3);
        x.random(1, 1, 2);
        cpu::dropout(x.view(), p, key, {{100000}, {begin}}, y.view());
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t bits = random_u32(key, static_cast<uint64_t>(begin + i));
          ASSERT_EQ(y.get(i) == 0, bits < std::floor(p * 0x1p32)) << name(dtype) << p << " " << i;
          ASSERT_TRUE(p > 0 || y.get(i) == x.get(i)) << name(dtype) << i;
        }
      }
}

TEST(Normal, RoundsToEveryFloatingType) {
  Buffer full(kF64, {500});
  cpu::normal(full.view(), Key{7}, GlobalIndex::whole({500}), 0, 1);
  for (const DType dtype : {kF32, kBF16, kF16}) {
    Buffer x(dtype, {500});
    cpu::normal(x.view(), Key{7}, GlobalIndex::whole({500}), 0, 1);
    EXPECT_LE(test::scaled_error(x.values(), full.values()), test::tolerance(dtype));
  }
  Buffer n(kI32, {5});
  EXPECT_THROW(cpu::normal(n.view(), Key{7}, GlobalIndex::whole({5}), 0, 1), DTypeError);
}

}  // namespace
}  // namespace sheaf
