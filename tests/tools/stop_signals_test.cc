#include "sheaf/tools/stop_signals.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace sheaf::tools {
namespace {

TEST(StopSignals, TheFirstIsNoted) {
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const StopSignals signals;
    EXPECT_EQ(signals.asked(), 0);
    raise(signal);
    EXPECT_EQ(signals.asked(), signal);
    for (int same : {SIGTERM, SIGINT, signal}) raise(same);  // immediately: the same request
    EXPECT_EQ(signals.asked(), signal);
  }
}

TEST(StopSignals, AnotherEndsTheProcess) {
  const auto twice = [](int first, int second) {
    const StopSignals signals;
    raise(first);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    raise(second);
  };
  EXPECT_EXIT(twice(SIGTERM, SIGTERM), ::testing::KilledBySignal(SIGTERM), "");
  EXPECT_EXIT(twice(SIGTERM, SIGINT), ::testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, OutsideOfItAllIsAsBefore) {
  const auto after = [] {
    { const StopSignals signals; }
    raise(SIGTERM);
  };
  EXPECT_EXIT(after(), ::testing::KilledBySignal(SIGTERM), "");
  // Signals ignored through nohup stay ignored.
  std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignals signals;
    raise(SIGHUP);
    EXPECT_EQ(signals.asked(), 0);
  }
  raise(SIGHUP);
  std::signal(SIGHUP, SIG_DFL);
}

}  // namespace
}  // namespace sheaf::tools
