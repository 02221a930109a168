#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "sheaf/core/parallel.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/distributed/collective_battery.h"
#include "sheaf/tests/distributed/suspend.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Communicator& lane(World& world) { return world.mesh({{"data", world.size()}}).runtime->gather_lane(0); }

#if defined(SHEAF_TSAN) || defined(SHEAF_ASAN)
constexpr int64_t kLarge = 20'000;
#else
constexpr int64_t kLarge = 200'000;
#endif

// As a sum does: whoever has it.
TEST(Local, MaximaAndMinimaOfANaNAreNaN) {
  run_local(3, [](World& world) {
    Communicator& comm = world.communicator();
    for (const Reduction of : {Reduction::max, Reduction::min}) {
      std::vector<float> x(4, static_cast<float>(world.rank()));
      x[static_cast<size_t>(world.rank())] = NAN;
      comm.all_reduce(x.data(), 4, kF32, of, "of numbers and none").sync();
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(x[static_cast<size_t>(i)])) << i;
      EXPECT_EQ(x[3], of == Reduction::max ? 2 : 0);
    }
  });
}

TEST(Local, EveryCollectiveAtWorlds1To5) {
  for (int n = 1; n <= 5; ++n) {
    std::vector<uint64_t> digests(n), prints(n);
    std::vector<int64_t> received(n);
    run_local(n, [&](World& world) {
      Communicator& comm = lane(world);
      testing::Battery battery(comm);
      battery.run(kLarge);
      digests[world.rank()] = battery.digest();
      prints[world.rank()] = comm.fingerprint();
      received[world.rank()] = comm.bytes_received();
    });
    for (int r = 1; r < n; ++r) {
      EXPECT_EQ(digests[r], digests[0]);
      EXPECT_EQ(prints[r], prints[0]);
      EXPECT_GT(received[r], 0);
    }
    EXPECT_EQ(received[0] == 0, n == 1);
  }
}

// On the rank's own thread if the lane is idle, otherwise after the lane's pending calls.
TEST(Local, WhatIsWaitedForIsDoneAtOnceAndInOrder) {
  std::latch looked(3);  // the last rank enters the barrier only when all have seen that it is not over
  run_local(3, [&](World& world) {
    Communicator& comm = lane(world);
    std::vector<float> x(10, 1.0f);
    comm.next_call_is_awaited();
    const Event first = comm.all_reduce(x.data(), 10, kF32, Reduction::sum, "idle");
    EXPECT_TRUE(first.ready());
    EXPECT_EQ(x[0], 3.0f);
    if (world.rank() == 2) looked.arrive_and_wait();
    const Event barrier = comm.barrier("not asked for");
    comm.all_reduce(x.data(), 10, kF32, Reduction::sum, "on the lane");
    if (world.rank() != 2) {
      EXPECT_FALSE(barrier.ready());
      looked.count_down();
    }
    comm.next_call_is_awaited();
    comm.all_reduce(x.data(), 10, kF32, Reduction::max, "behind it").sync();
    EXPECT_EQ(x[0], 9.0f);
    comm.barrier("end").sync();
  });
}

TEST(Local, WhatGoesWrongIsThrownWhereItIsWaitedFor) {
  run_local(2, [](World& world) {
    Communicator& comm = lane(world);
    float x = 1;
    comm.next_call_is_awaited();
    EXPECT_THROW(comm.all_reduce(&x, 1, kF32, world.rank() ? Reduction::max : Reduction::sum, "other calls"), CommError);
    EXPECT_THROW(comm.barrier("poisoned"), CommError);
  });
}

TEST(Local, CallsRunInOrderAndEventsComplete) {
  run_local(3, [](World& world) {
    Communicator& comm = lane(world);
    std::vector<float> x(1000, 1.0f);
    std::vector<Event> events;
    for (int i = 0; i < 50; ++i) events.push_back(comm.all_reduce(x.data(), 1000, kF32, Reduction::sum, "order"));
    for (int i = 0; i < 50; ++i) comm.all_reduce(x.data(), 1000, kF32, Reduction::max, "order");
    comm.barrier("order").sync();
    for (const Event& e : events) EXPECT_TRUE(e.ready());
    EXPECT_EQ(comm.sequence(), 101u);
    float expected = 1.0f;
    for (int i = 0; i < 50; ++i) expected = (expected + expected) + expected;
    for (float v : x) EXPECT_EQ(v, expected);
  });
}

TEST(Local, BytesReceivedFollowTheFormulas) {
  run_local(4, [](World& world) {
    Communicator& comm = lane(world);
    const int me = world.rank();
    std::vector<float> all(4096 * 4), x(4096 * 4);
    const std::vector<int64_t> counts = {10, 0, 20, 30};
    comm.all_gather(x.data(), all.data(), counts, kF32, "b").sync();
    int64_t expected = 4 * (60 - counts[me]);
    EXPECT_EQ(comm.bytes_received(), expected);
    comm.reduce_scatter(all.data(), x.data(), counts, kF32, "b").sync();
    EXPECT_EQ(comm.bytes_received(), expected += 4 * 3 * counts[me]);
    comm.all_reduce(x.data(), 4096, kF32, Reduction::sum, "b").sync();  // bytes of a ring: 2 (n-1)/n of the data
    EXPECT_EQ(comm.bytes_received(), expected += 2 * 3 * 4096);
    comm.broadcast(x.data(), 100, 2, "b").sync();
    EXPECT_EQ(comm.bytes_received(), expected += me == 2 ? 0 : 100);
  });
}

TEST(Local, LanesOfOneAxisDoNotWaitForEachOther) {
  run_local(2, [](World& world) {
    Mesh mesh = world.mesh({{"data", 2}});
    std::vector<float> a(8, 1.0f), b(8, 1.0f);
    // Opposite orders on the two ranks would deadlock on one lane.
    if (world.rank() == 0) {
      mesh.runtime->gather_lane(0).all_reduce(a.data(), 8, kF32, Reduction::sum, "a").sync();
      mesh.runtime->reduce_lane(0).all_reduce(b.data(), 8, kF32, Reduction::sum, "b").sync();
    } else {
      Event second = mesh.runtime->reduce_lane(0).all_reduce(b.data(), 8, kF32, Reduction::sum, "b");
      mesh.runtime->gather_lane(0).all_reduce(a.data(), 8, kF32, Reduction::sum, "a").sync();
      second.sync();
    }
    EXPECT_EQ(a[7] + b[7], 4.0f);
  });
}

TEST(Local, MeshOfTwoAxes) {
  run_local(6, [](World& world) {
    Mesh mesh = world.mesh({{"data", 2}, {"model", 3}});
    EXPECT_EQ(mesh.coordinate("data") * 3 + mesh.coordinate("model"), world.rank());
    EXPECT_EQ(RankContext::current().coordinate(mesh.spec, 1), world.rank() % 3);
    EXPECT_EQ(RankContext::current().runtime(mesh.spec), mesh.runtime.get());
    for (int axis = 0; axis < 2; ++axis) {
      Communicator& comm = mesh.runtime->gather_lane(axis);
      ASSERT_EQ(comm.size(), mesh.spec->size(axis));
      std::vector<int64_t> counts(comm.size(), 1);
      std::vector<int32_t> ranks(comm.size());
      const int32_t me = world.rank();
      comm.all_gather(&me, ranks.data(), counts, kI32, "ranks").sync();
      for (int i = 0; i < comm.size(); ++i)
        EXPECT_EQ(ranks[i], axis == 0 ? i * 3 + world.rank() % 3 : world.rank() / 3 * 3 + i);
    }
    EXPECT_EQ(world.mesh({{"data", 2}, {"model", 3}}).runtime, mesh.runtime);
    EXPECT_THROW(world.mesh({{"data", 4}}), ConfigError);
  });
}

/// Notes when it ends.
class NotedCommunicator final : public CommunicatorBase {
 public:
  NotedCommunicator(CommunicatorGroup group, std::shared_ptr<FailureBoard> board, std::vector<std::string>& ended)
      : CommunicatorBase(std::move(group), std::move(board)), ended_(ended) {}
  ~NotedCommunicator() override { ended_.push_back(group_.name); }
  std::string_view kind() const override { return "noted"; }
  int64_t staging_bytes() const override { return 0; }

 private:
  void run(const Collective&) override {}
  std::vector<std::string>& ended_;
};

class NotedTransport final : public Transport {
 public:
  explicit NotedTransport(std::vector<std::string>& ended) : ended_(ended) {}
  std::string_view kind() const override { return "noted"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override {
    return std::make_unique<NotedCommunicator>(group, board_, ended_);
  }
  FailureBoard& board() override { return *board_; }

 private:
  const std::shared_ptr<FailureBoard> board_ = std::make_shared<FailureBoard>();
  std::vector<std::string>& ended_;
};

// Not in the order of their specs' addresses, which differs between ranks.
TEST(Local, MeshesEndInTheOrderInWhichTheyWereMade) {
  using Axes = std::vector<MeshSpec::Axis>;
  const Axes meshes[] = {{{"last", 6}}, {{"first", 2}, {"second", 3}}, {{"middle", 6}}};
  for (int first : {0, 1, 2}) {
    std::vector<std::string> ended;
    std::vector<std::string> expected;
    {
      RankContext context;
      RankScope scope(context);
      World world(std::make_shared<NotedTransport>(ended), context, 4, 6, 4, 6);
      for (int i = 0; i < 3; ++i) expected.push_back(world.mesh(meshes[(first + i) % 3]).spec->to_string());
    }
    ASSERT_EQ(ended.size(), 8u);
    std::vector<std::string> order;
    for (const std::string& name : ended)
      if (const std::string mesh = name.substr(0, name.find(")/") + 1); order.empty() || order.back() != mesh)
        order.push_back(mesh);
    EXPECT_EQ(order, expected);
  }
}

TEST(Local, RankContextsAreFilledIn) {
  run_local(3, [](World& world) {
    RankContext& context = RankContext::current();
    EXPECT_EQ(context.rank, world.rank());
    EXPECT_EQ(context.world, 3);
    EXPECT_EQ(context.threads, 2);
    EXPECT_EQ(num_threads(), 2);
  }, {.threads_per_rank = 2});
}

TEST(Local, ThrowingRankWakesTheOthersAndIsRethrown) {
  std::atomic<int> told = 0;
  const auto start = Clock::now();
  try {
    run_local(3, [&](World& world) {
      float x = 1;
      if (world.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(50));
        fail<DataError>("[data] token 70000 is out of vocabulary");
      }
      try {
        lane(world).all_reduce(&x, 1, kF32, Reduction::sum, "blocks.3").sync();
      } catch (const CommError& e) {
        EXPECT_EQ(e.exit_code(), 72);
        const std::string what = e.what();
        EXPECT_NE(what.find("rank 1 failed: [data] token 70000"), std::string::npos) << what;
        EXPECT_NE(what.find("[all_reduce] rank " + std::to_string(world.rank()) + " of 3"), std::string::npos) << what;
        EXPECT_NE(what.find("at sequence 1 (blocks.3)"), std::string::npos) << what;
        ++told;
        throw;
      }
    });
    FAIL() << "nothing was thrown";
  } catch (const DataError& e) {
    EXPECT_EQ(e.exit_code(), 65);
  }
  EXPECT_EQ(told, 2);
  EXPECT_LT(seconds_since(start), 20.0);  // no time-out
}

TEST(Local, AFailedJobRefusesLaterCalls) {
  EXPECT_THROW(run_local(2, [](World& world) {
    Communicator& comm = lane(world);
    if (world.rank() == 0) comm.abort("had enough");
    EXPECT_THROW(comm.barrier("x").sync(), CommError);
    EXPECT_THROW(comm.barrier("y"), CommError);
    EXPECT_THROW(world.mesh({{"data", 2}}).runtime->reduce_lane(0).barrier("z").sync(), CommError);
    fail<CommError>("over");
  }), CommError);
}

void expect_failure(int ranks, int code, std::vector<std::string> parts, const std::function<void(World&)>& body,
                    LocalOptions options = {}) {
  std::atomic<int> codes = 0;
  try {
    run_local(ranks, [&](World& world) {
      try {
        body(world);
      } catch (const Error& e) {
        codes += e.exit_code() == code;
        throw;
      }
    }, options);
    FAIL() << "nothing was thrown";
  } catch (const CommError& e) {
    EXPECT_EQ(e.exit_code(), code) << e.what();
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << part << " is not in: " << e.what();
  }
  EXPECT_GE(codes, 1);
}

// The last of three ranks does not call a gather.
void expect_time_out(const std::string& path, const std::string& what, LocalOptions options) {
  std::atomic<bool> over = false;
  expect_failure(3, 71, {"[all_gather] rank", what, "missing ranks: 2"},
                 [&](World& world) {
                   Communicator& comm = lane(world);
                   comm.barrier("start").sync();
                   if (world.rank() == 2) {
                     while (!over) std::this_thread::sleep_for(milliseconds(5));
                     return;
                   }
                   std::vector<int64_t> counts(3, 1);
                   std::vector<float> x(3);
                   Event e = comm.all_gather(&x[world.rank()], x.data(), counts, kF32, path);
                   try {
                     e.sync();
                   } catch (...) {
                     over = true;
                     throw;
                   }
                 },
                 options);
}

TEST(Local, HangEndsInATimeOutThatNamesTheMissing) {
  for (const std::string path : {"blocks.3", ""})  // the root unit's collectives have the empty path
    expect_time_out(path, "of 3: time-out after 3.0 s at sequence 2 (" + (path.empty() ? "root" : path) + ")",
                    {.timeout = milliseconds(3000)});
}

TEST(Local, ACallWithoutADeadlineWaits) {
  run_local(3, [](World& world) {
    Communicator& comm = lane(world);
    if (world.rank() == 2) std::this_thread::sleep_for(milliseconds(700));
    int32_t all = 1;
    comm.next_call_has_no_deadline();
    comm.all_reduce(&all, 1, kI32, Reduction::sum, "patient").sync();
    EXPECT_EQ(all, 3);
  }, {.timeout = milliseconds(200)});
}

TEST(Local, TimeInWhichTheProcessIsSuspendedDoesNotCount) {
  run_local(3, [](World& world) {
    if (world.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(300));  // the others wait
      testing::suspend({getpid()}, 4);
      std::this_thread::sleep_for(milliseconds(300));
    }
    lane(world).barrier("suspended").sync();
  }, {.timeout = milliseconds(3000)});
}

TEST(Local, TheEnvironmentSaysHowLongAHangMayTake) {
  struct Variable {
    explicit Variable(const char* value) { setenv("SHEAF_TIMEOUT", value, 1); }
    ~Variable() { unsetenv("SHEAF_TIMEOUT"); }
  };
  {
    const Variable given("2.5");
    expect_time_out("blocks.3", "time-out after 2.5 s", {});
    expect_time_out("blocks.3", "time-out after 3.0 s", {.timeout = milliseconds(3000)});  // options in the program win
  }
  const Variable wrong("soon");
  try {
    run_local(2, [](World&) {});
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("SHEAF_TIMEOUT='soon'"), std::string::npos) << e.what();
  }
}

TEST(Local, DisagreementNamesBothSides) {
  const auto call = [](World& world, auto other) {
    std::vector<float> x(64);
    Communicator& comm = lane(world);
    std::vector<int64_t> counts(3, 2);
    if (world.rank() == 1) other(comm, x, counts);
    else comm.all_gather(&x[8], x.data(), counts, kF32, "blocks.1").sync();
  };
  const std::string ours = "rank 0 calls all_gather f32 [2, 2, 2] (blocks.1)";
  expect_failure(3, 70, {ours, "rank 1 calls reduce_scatter f32 [2, 2, 2] (blocks.1)"}, [&](World& world) {
    call(world, [](auto& c, auto& x, auto& n) { c.reduce_scatter(x.data(), &x[8], n, kF32, "blocks.1").sync(); });
  });
  expect_failure(3, 70, {ours, "rank 1 calls all_gather f32 [2, 3, 2] (blocks.1)"}, [&](World& world) {
    call(world, [](auto& c, auto& x, auto& n) { n[1] = 3; c.all_gather(&x[8], x.data(), n, kF32, "blocks.1").sync(); });
  });
  expect_failure(3, 70, {ours, "rank 1 calls all_gather i32 [2, 2, 2] (blocks.1)"}, [&](World& world) {
    call(world, [](auto& c, auto& x, auto& n) { c.all_gather(&x[8], x.data(), n, kI32, "blocks.1").sync(); });
  });
  expect_failure(3, 70, {ours, "rank 1 calls all_gather f32 [2, 2, 2] (blocks.2)"}, [&](World& world) {
    call(world, [](auto& c, auto& x, auto& n) { c.all_gather(&x[8], x.data(), n, kF32, "blocks.2").sync(); });
  });
  expect_failure(2, 70, {"rank 1 sends 4 elements to rank 0, which expects 3"}, [&](World& world) {
    std::vector<float> x(8), y(8);
    const std::vector<int64_t> send = {4, 1}, recv = {world.rank() == 0 ? 4 : 1, world.rank() == 0 ? 3 : 1};
    lane(world).all_to_all(x.data(), send, y.data(), recv, kF32, "moe").sync();
  });
}

TEST(Local, ARankThatLeavesEarlyIsNamed) {
  expect_failure(3, 72, {"rank 2 failed: it has left the job"}, [&](World& world) {
    Communicator& comm = lane(world);
    comm.barrier("once").sync();
    if (world.rank() != 2) comm.barrier("twice").sync();
  });
}

constexpr int kTries = 6;  // a busy machine may make some of them longer

TEST(Local, DelayLengthensACollectiveButNotTheCaller) {
  run_local(2, [](World& world) {
    Communicator& comm = lane(world);
    double calling = 1;
    for (int i = 0; i < kTries; ++i) {
      const auto start = Clock::now();
      Event e = comm.barrier("slow");
      calling = std::min(calling, seconds_since(start));
      e.sync();
      EXPECT_GE(seconds_since(start), 0.05);
    }
    EXPECT_LT(calling, 0.04);
  }, {.delay = milliseconds(50)});
}

TEST(Local, ASlowLinkTakesItsTimeForWhatARankReceives) {
  constexpr int64_t kEach = 10'000;
  run_local(3, [&](World& world) {
    std::vector<float> mine(kEach, static_cast<float>(world.rank())), all(3 * kEach);
    double calling = 1;
    for (int i = 0; i < kTries; ++i) {
      const auto start = Clock::now();
      Event e = lane(world).all_gather(mine.data(), all.data(), std::vector<int64_t>(3, kEach), kF32, "slow");
      calling = std::min(calling, seconds_since(start));
      e.sync();
      EXPECT_GE(seconds_since(start), 0.08);
    }
    EXPECT_LT(calling, 0.04);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(all[(r + 1) * kEach - 1], static_cast<float>(r));
  }, {.bytes_per_second = 1e6});
}

TEST(Local, LinksBetweenHostsHaveASpeedOfTheirOwn) {
  constexpr int64_t kEach = 10'000;
  run_local(4, [&](World& world) {
    const Mesh mesh = world.mesh({{"host", 2}, {"rank", 2}});
    const std::vector<float> mine(kEach, static_cast<float>(world.rank()));
    const auto gather = [&](Communicator& comm) {
      std::vector<float> all(static_cast<size_t>(comm.size()) * kEach);
      const auto start = Clock::now();
      comm.all_gather(mine.data(), all.data(), std::vector<int64_t>(static_cast<size_t>(comm.size()), kEach), kF32, "links").sync();
      return seconds_since(start);
    };
    double on_one_host = 1;
    for (int i = 0; i < kTries; ++i) on_one_host = std::min(on_one_host, gather(mesh.runtime->gather_lane(1)));
    EXPECT_LT(on_one_host, 0.04);
    EXPECT_GE(gather(mesh.runtime->gather_lane(0)), 0.04) << "from another";
    EXPECT_GE(gather(lane(world)), 0.08) << "from two on another";
  }, {.ranks_per_host = 2, .bytes_per_second_between_hosts = 1e6});
}

TEST(Local, ManyFailuresAtOnceNeverHang) {
  for (int trial = 0; trial < 30; ++trial) {
    // Outside, because a rank that throws leaves collectives unfinished that still use them.
    std::vector<std::vector<float>> buffers(4, std::vector<float>(4000, 1.0f));
    std::atomic<int> told = 0;
    const auto step_until_failure = [&](World& world) {
      Mesh mesh = world.mesh({{"data", 4}});
      std::vector<float>& x = buffers[world.rank()];
      for (int step = 0;; ++step) {
        Event a = mesh.runtime->gather_lane(0).all_reduce(x.data(), 2000, kF32, Reduction::sum, "a");
        Event b = mesh.runtime->reduce_lane(0).all_reduce(x.data() + 2000, 2000, kF32, Reduction::sum, "b");
        if (step == trial % 7 && world.rank() % 2 == trial % 2) fail<DataError>("bad");
        a.sync();
        b.sync();
      }
    };
    EXPECT_THROW(run_local(4, [&](World& world) {
      try {
        step_until_failure(world);
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("bad"));
        ++told;
        throw;
      }
    }), DataError);
    EXPECT_GE(told, 2) << "the others, at least";
  }
}

}  // namespace
}  // namespace sheaf
