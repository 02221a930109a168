#include "sheaf/core/parallel.h"

#include <gtest/gtest.h>
#include <immintrin.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "sheaf/core/cores.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

// How often each of n items was covered; ranges that are too short or out of bounds count 100 times.
std::vector<int> coverage(int64_t n, int64_t grain) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const bool good = 0 <= begin && begin < end && end <= n && (end - begin >= std::min(grain, n) || end == n);
    for (int64_t i = begin; i < end; ++i) seen[static_cast<size_t>(i)] += good ? 1 : 100;
  });
  return {seen.begin(), seen.end()};
}

void with_threads(int threads, const std::function<void()>& f) {
  RankContext context;
  context.threads = threads;
  const RankScope scope(context);
  f();
}

TEST(ParallelFor, CoversEveryItemOnce) {
  for (int threads : {1, 2, 3, 5, 9})
    with_threads(threads, [&] {
      for (int64_t n : {0, 1, 2, 7, 64, 1000})
        for (int64_t grain : {1, 3, 100}) EXPECT_EQ(coverage(n, grain), std::vector<int>(static_cast<size_t>(n), 1));
    });
}

TEST(ParallelFor, TheCutDependsOnTheSizesAlone) {
  with_threads(3, [] {
    std::vector<std::vector<std::pair<int64_t, int64_t>>> cuts;
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> next{0};
      std::vector<std::pair<int64_t, int64_t>> cut(3);
      parallel_for(100, 1, [&](int64_t begin, int64_t end) { cut[static_cast<size_t>(next++)] = {begin, end}; });
      std::sort(cut.begin(), cut.end());
      cuts.push_back(cut);
    }
    for (const auto& cut : cuts) EXPECT_EQ(cut, cuts[0]);
  });
}

// So that which error is reported does not depend on threads.
TEST(ParallelFor, ThrowsWhatTheFirstRangeThrew) {
  RankContext context;
  context.threads = 4;
  const RankScope scope(context);
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::string what = "nothing";
    try {
      parallel_for(4, 1, [](int64_t begin, int64_t) {
        if (begin == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the last to throw
        if (begin > 0) throw std::runtime_error(std::to_string(begin));
      });
    } catch (const std::runtime_error& e) {
      what = e.what();
    }
    ASSERT_EQ(what, "1");
  }
}

TEST(ParallelFor, ThrowsWhatARangeThrewAndGoesOn) {
  with_threads(4, [] {
    for (int64_t culprit = 0; culprit < 4; ++culprit) {
      EXPECT_THROW(parallel_for(4, 1, [&](int64_t begin, int64_t) {
        if (begin == culprit) throw std::runtime_error("range");
      }), std::runtime_error);
      EXPECT_EQ(coverage(40, 1), std::vector<int>(40, 1));
    }
    EXPECT_THROW(parallel_for(4, 1, [](int64_t, int64_t) { throw std::runtime_error("all"); }), std::runtime_error);
  });
}

TEST(ParallelFor, FromInsideRunsInline) {
  with_threads(3, [] {
    std::atomic<int> ranges{0};
    parallel_for(3, 1, [&](int64_t, int64_t) {
      const auto outer = std::this_thread::get_id();
      parallel_for(100, 1, [&](int64_t begin, int64_t end) {
        if (begin == 0 && end == 100 && std::this_thread::get_id() == outer) ++ranges;
      });
    });
    EXPECT_EQ(ranges, 3);
  });
}

// Ranks are threads: each has its own team, which ends with it.
TEST(ParallelFor, ManyCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      with_threads(3, [&] {
        for (int round = 0; round < 300; ++round)
          parallel_for(30, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
      });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 300 * 30);
}

// Writes of one range are visible to the caller and to the ranges of the next call.
TEST(ParallelFor, CallsAreOrdered) {
  with_threads(3, [] {
    std::vector<int64_t> values(999, 0);
    for (int round = 0; round < 200; ++round) {
      parallel_for(999, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(998 - i)] += values[static_cast<size_t>(998 - i)] + 1 > round;
      });
      std::reverse(values.begin(), values.end());
    }
    EXPECT_EQ(values, std::vector<int64_t>(999, 200));
  });
}

// The workers do not exist in a forked process: its calls must not wait for them, as no call may wait for one that has not started.
TEST(ParallelFor, DoesNotWaitForWorkersThatNeverBegin) {
  with_threads(4, [] {
    EXPECT_EQ(coverage(40, 1), std::vector<int>(40, 1));  // the team is there
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(coverage(40, 1) == std::vector<int>(40, 1) ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
}

// More threads than cores, and some slow ranges: a worker, like the caller, then sleeps until the thread that took its part is done, and
// both must be woken.
TEST(ParallelFor, CallsEndWhereOthersTakeTheParts) {
  const int threads = 2 * available_cores() + 1;
  with_threads(threads, [threads] {
    uint32_t random = 1;
    for (int round = 0; round < 4000; ++round) {
      std::vector<std::chrono::microseconds> takes(static_cast<size_t>(threads));
      for (auto& t : takes) {
        random = random * 1664525 + 1013904223;
        t = std::chrono::microseconds(random >> 29 == 0 ? 400 : random >> 28);
      }
      std::atomic<int> ranges{0};
      parallel_for(threads, 1, [&](int64_t begin, int64_t) {
        const auto until = std::chrono::steady_clock::now() + takes[static_cast<size_t>(begin)];
        while (std::chrono::steady_clock::now() < until) {}
        ++ranges;
      });
      ASSERT_EQ(ranges, threads);
    }
  });
}

TEST(ParallelFor, WorkersThatSleepAreWoken) {
  with_threads(2, [] {
    for (int round = 0; round < 20; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than workers spin
      std::atomic<int> here{0};
      // Each range waits for the other: they must run on two threads.
      parallel_for(2, 1, [&](int64_t, int64_t) {
        ++here;
        while (here < 2) std::this_thread::yield();
      });
    }
  });
}

// A thread outside any RankScope computes parts like the workers: the result does not show which thread computed what.
TEST(ParallelFor, AllThreadsFlushDenormals) {
  constexpr unsigned kAsAProgramBegins = 0x1f80;  // a thread starts with the settings of its creator
  std::thread([] {
    _mm_setcsr(kAsAProgramBegins);
    std::vector<float> x(100000, 1e-30f);
    volatile float by = 1e-10f;
    parallel_for(std::ssize(x), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) x[static_cast<size_t>(i)] *= by;
    });
    EXPECT_EQ(std::ranges::count(x, 0.0f), std::ssize(x));
  }).join();
  std::thread([] {
    _mm_setcsr(kAsAProgramBegins);
    RankContext::current();
    volatile float x = 1e-30f, by = 1e-10f;
    EXPECT_EQ(x * by, 0.0f) << "nor does a kernel that is not shared out";
  }).join();
}

}  // namespace
}  // namespace sheaf
