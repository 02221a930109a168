#include "sheaf/core/small_vector.h"

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sheaf/core/recycled.h"
#include "sheaf/core/spin_mutex.h"

namespace sheaf {
namespace {

using Strings = SmallVector<std::string, 2>;

Strings letters(int n) {
  Strings out;
  for (int i = 0; i < n; ++i) out.emplace_back(std::string(40, static_cast<char>('a' + i)));
  return out;
}

TEST(SmallVector, HoldsMoreThanItHasRoomFor) {
  for (int n = 0; n < 9; ++n) {
    const Strings v = letters(n);
    ASSERT_EQ(v.size(), static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) EXPECT_EQ(v[static_cast<size_t>(i)], std::string(40, static_cast<char>('a' + i)));
  }
}

TEST(SmallVector, MovesLeaveNothingBehind) {
  for (int n : {0, 1, 2, 3, 7}) {
    Strings from = letters(n);
    Strings to = std::move(from);
    EXPECT_TRUE(from.empty());
    ASSERT_EQ(to.size(), static_cast<size_t>(n));
    from.push_back("again");
    EXPECT_EQ(from.back(), "again");
    to = std::move(from);  // its previous content is freed
    ASSERT_EQ(to.size(), 1u);
    EXPECT_EQ(to[0], "again");
    to = letters(n);
    EXPECT_EQ(to.size(), static_cast<size_t>(n));
  }
}

TEST(SmallVector, AnElementOfItsOwnCanBeAppendedWhileItGrows) {
  Strings v = letters(2);
  v.push_back(v[0]);
  EXPECT_EQ(v[2], std::string(40, 'a'));
}

TEST(SmallVector, ElementsDieOnce) {
  const auto counted = std::make_shared<int>(0);
  {
    SmallVector<std::shared_ptr<int>, 2> v;
    for (int i = 0; i < 5; ++i) v.push_back(counted);
    EXPECT_EQ(counted.use_count(), 6);
    v.clear();
    EXPECT_EQ(counted.use_count(), 1);
    v.push_back(counted);
    SmallVector<std::shared_ptr<int>, 2> few{counted, counted};
    v = std::move(few);
    EXPECT_EQ(counted.use_count(), 3);
  }
  EXPECT_EQ(counted.use_count(), 1);
}

// Blocks that one thread allocates and another frees, in any order, never overlap.
TEST(Recycled, BlocksAreOneOwnersAtATime) {
  struct Thing {
    explicit Thing(int64_t v) : value(v), again(v) {}
    int64_t value, padding[6] = {}, again;
  };
  const auto make = [](int64_t first) {
    std::vector<std::shared_ptr<Thing>> things;
    for (int64_t i = 0; i < 9000; ++i) things.push_back(std::allocate_shared<Thing>(Recycled<Thing>(), first + i));
    return things;
  };
  auto mine = make(0);
  for (int round = 1; round <= 3; ++round) {
    std::vector<std::shared_ptr<Thing>> theirs;
    std::thread([&] {
      theirs = make(10000 * round);
      for (size_t i = 0; i < mine.size(); i += 2) mine[i].reset();  // more than a thread caches
    }).join();
    for (size_t i = 1; i < mine.size(); i += 2) {
      ASSERT_EQ(mine[i]->value, mine[i]->again);
      ASSERT_EQ(mine[i]->value, 10000 * (round - 1) + static_cast<int64_t>(i));
    }
    mine = std::move(theirs);
  }
}

TEST(SpinMutex, LetsOneInAtATime) {
  SpinMutex mutex;
  int64_t count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        const std::lock_guard lock(mutex);
        count = count + 1;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(count, 80000);
}

}  // namespace
}  // namespace sheaf
