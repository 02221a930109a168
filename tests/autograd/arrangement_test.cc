// Placing values in one block of memory: values that are live at the same time do not overlap, and the block is little larger than the most
// that is live at once.
#include <gtest/gtest.h>

#include <random>

#include "sheaf/autograd/arrangement.h"

namespace sheaf::testing {
namespace {

void expect_apart(const std::vector<Lifetime>& lives, const Arrangement& a) {
  ASSERT_EQ(a.offsets.size(), lives.size());
  for (size_t i = 0; i < lives.size(); ++i) {
    EXPECT_EQ(a.offsets[i] % Arrangement::kAlign, 0);
    EXPECT_GE(a.offsets[i], 0);
    EXPECT_LE(a.offsets[i] + lives[i].bytes, a.total);
    for (size_t j = 0; j < i; ++j) {
      const bool meet = lives[i].first <= lives[j].last && lives[j].first <= lives[i].last;
      const bool apart = a.offsets[i] + lives[i].bytes <= a.offsets[j] || a.offsets[j] + lives[j].bytes <= a.offsets[i];
      EXPECT_TRUE(!meet || apart) << i << " and " << j;
    }
  }
}

TEST(Arrangement, LivesThatMeetLieApart) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 200; ++round) {
    std::vector<Lifetime> lives;
    for (int i = below(60); i >= 0; --i) {
      const int first = below(40);
      lives.push_back({first, first + below(15), below(4) == 0 ? 0 : below(5000)});
    }
    const Arrangement a = arrange(lives);
    expect_apart(lives, a);
    EXPECT_GE(a.total, most_alive(lives));
    EXPECT_LE(a.total, most_alive(lives) * 3 / 2);
  }
}

// Like a forward whose saved values the backward frees in reverse order, with scratch in between.
TEST(Arrangement, AStackTakesNoMoreThanItsPeak) {
  std::vector<Lifetime> lives;
  constexpr int kLayers = 40;
  for (int i = 0; i < kLayers; ++i) {
    lives.push_back({i, 2 * kLayers - i, 1000 + 128 * (i % 7)});
    lives.push_back({i, i, 7000});
    lives.push_back({2 * kLayers - i, 2 * kLayers - i, 9000});
  }
  const Arrangement a = arrange(lives);
  expect_apart(lives, a);
  EXPECT_EQ(a.total, most_alive(lives));
}

TEST(Arrangement, WhatIsAliveIsCounted) {
  EXPECT_EQ(most_alive({}), 0);
  EXPECT_EQ(arrange({}).total, 0);
  const std::vector<Lifetime> lives{{0, 2, 128}, {2, 3, 256}, {3, 5, 512}, {6, 6, 1}};
  EXPECT_EQ(most_alive(lives), 768);  // the second is still live when the third begins
  EXPECT_EQ(arrange(lives).total, 768);
}

}  // namespace
}  // namespace sheaf::testing
