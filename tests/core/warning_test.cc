#include "sheaf/core/warning.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace sheaf {
namespace {

TEST(Warning, ThreadsTakeTurns) {
  std::atomic<int> inside = 0;
  std::vector<std::string> lines;
  const Warn warn = one_at_a_time([&](const std::string& line) {
    EXPECT_EQ(++inside, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    lines.push_back(line);
    --inside;
  });
  const auto call = [&, mine = warn] {  // a copy has the same turns
    for (int i = 0; i < 5; ++i) mine("it is full");
  };
  std::thread other(call);
  call();
  other.join();
  EXPECT_EQ(lines, std::vector<std::string>(10, "it is full"));
}

}  // namespace
}  // namespace sheaf
