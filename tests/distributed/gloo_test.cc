// Gloo ranks are processes: this program runs itself again, once per rank, with --worker=<scenario>.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <thread>

#include <unistd.h>

#include "sheaf/distributed/gloo_staging.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/launcher.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/distributed/collective_battery.h"
#include "sheaf/tests/distributed/process_job.h"

namespace sheaf {
namespace {

using std::chrono::milliseconds;
using testing::ProcessJob;
using testing::ProcessResult;
using testing::run_processes;

constexpr int64_t kLarge = 1'300'000;  // bytes: several chunks of staging
#ifdef SHEAF_TSAN
constexpr int kLargestWorld = 3;
#else
constexpr int kLargestWorld = 5;
#endif

// ---- what the ranks do ----

Communicator& lane(World& world) { return world.mesh({{"data", world.size()}}).runtime->gather_lane(0); }

std::string battery_report(World& world) {
  Communicator& comm = lane(world);
  testing::Battery battery(comm);
  battery.run(kLarge);
  return str("digest ", battery.digest(), ' ', comm.fingerprint(), ' ', comm.sequence(), " received ",
             comm.bytes_received());
}

void run_battery(World& world) {
  const int64_t before = RankContext::current().cpu->stats().live;
  const std::string report = battery_report(world);
  const int64_t held = RankContext::current().cpu->stats().live - before;
  if (::testing::Test::HasFailure()) std::_Exit(1);
  std::cout << report << (held == 2 * gloo_staging_bytes(world.size()) ? "" : " wrong staging") << std::endl;
}

/// All-reduces without end; `event` happens on rank 1 (or `culprit`) at the sixth.
void train(World& world, const std::function<void()>& event, int culprit = 1) {
  Mesh mesh = world.mesh({{"data", world.size()}});
  static std::vector<float> x(100'000), y(100'000);  // outlive what a failure leaves behind
  for (int step = 0; step < 100'000; ++step) {
    if (step == 5 && world.rank() == culprit) event();
    Event a = mesh.runtime->gather_lane(0).all_reduce(x.data(), 100'000, kF32, Reduction::sum, "blocks.3");
    Event b = mesh.runtime->reduce_lane(0).all_reduce(y.data(), 100'000, kF32, Reduction::sum, "blocks.4");
    a.sync();
    b.sync();
  }
}

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

const std::map<std::string, std::function<void(World&)>>& scenarios() {
  static const auto* all = new std::map<std::string, std::function<void(World&)>>{
      {"battery", run_battery},
      {"kill", [](World& w) { train(w, [] { raise(SIGKILL); }); }},
      {"kill0", [](World& w) { train(w, [] { raise(SIGKILL); }, 0); }},
      {"throw", [](World& w) {
         w.guard([&] { train(w, [] { fail<DataError>("[data] token 70000 is out of vocabulary"); }); });
       }},
      {"throw_unguarded", [](World& w) { train(w, [] { fail<DataError>("[data] bad token"); }); }},
      {"exit", [](World& w) { train(w, [] { std::_Exit(65); }); }},
      {"hang", [](World& w) { train(w, [] { sleep_for(2.5); }, 2); }},
      {"stopped", [](World& w) { train(w, [] { raise(SIGSTOP); }, 2); }},
      {"leave", [](World& w) {
         Communicator& comm = lane(w);
         comm.barrier("once").sync();
         if (w.rank() != 1) comm.barrier("twice").sync();
       }},
      {"mismatch", [](World& w) {
         Communicator& comm = lane(w);
         const std::vector<int64_t> counts(w.size(), 1000);
         std::vector<float> x(1000 * w.size()), y(1000);
         comm.all_gather(y.data(), x.data(), counts, kF32, "blocks.0").sync();
         if (w.rank() == 1) comm.reduce_scatter(x.data(), y.data(), counts, kF32, "blocks.1").sync();
         else comm.all_gather(y.data(), x.data(), counts, kF32, "blocks.1").sync();
       }},
      {"skip", [](World& w) {  // one rank leaves a call out
         Communicator& comm = lane(w);
         std::vector<float> x(1000);
         for (int i = 0; i < 10; ++i)
           if (i != 4 || w.rank() != 1)
             comm.all_reduce(x.data(), 1000, kF32, Reduction::sum, "blocks." + std::to_string(i)).sync();
       }},
      {"mismatch_all_to_all", [](World& w) {
         std::vector<float> x(100), y(100);
         const bool first = w.rank() == 0;
         const std::vector<int64_t> send = {first ? 1 : 5, 1}, recv = {1, first ? 4 : 1};
         lane(w).all_to_all(x.data(), send, y.data(), recv, kF32, "moe").sync();
       }},
      {"axes", [](World& w) {
         Mesh mesh = w.mesh({{"data", 2}, {"model", 2}});
         for (int axis = 0; axis < 2; ++axis) {
           std::vector<int32_t> ranks(2);
           const int32_t me = w.rank();
           const std::vector<int64_t> ones = {1, 1};
           mesh.runtime->gather_lane(axis).all_gather(&me, ranks.data(), ones, kI32, "ranks").sync();
           const int base = axis == 0 ? me % 2 : me / 2 * 2, stride = axis == 0 ? 2 : 1;
           if (ranks[0] != base || ranks[1] != base + stride) fail<CommError>("wrong group");
         }
         w.print("axes ", RankContext::current().threads, " threads");
       }},
      {"wait", [](World& w) {
         lane(w).barrier("start").sync();
         if (w.rank() == 0) std::cout << "started" << std::endl;
         sleep_for(60);
       }},
      {"nothing", [](World&) {}},
  };
  return *all;
}

int worker(const std::string& scenario) {
  if (scenario.starts_with("launch/")) {  // launch/<ranks>/<scenario>
    const int n = scenario[7] - '0';
    try {
      return distributed::launch({.nproc = n, .threads_per_rank = 0,
                                  .command = {"/proc/self/exe", "--worker=" + scenario.substr(9)}});
    } catch (const Error& e) {
      std::cerr << e.what() << std::endl;
      return e.exit_code();
    }
  }
  if (scenario.starts_with("exit65on")) {  // without communication
    if (std::getenv("RANK")[0] == scenario[8]) return 65;
    sleep_for(60);
    return 0;
  }
  try {
    World world = distributed::init_from_env();
    scenarios().at(scenario)(world);
    return 0;
  } catch (const Error& e) {
    std::cerr << e.what() << std::endl;
    return e.exit_code();
  }
}

// ---- what is expected of them ----

void expect_said(const ProcessResult& result, const std::string& part) {
  EXPECT_NE(result.output.find(part), std::string::npos) << part << " is not in: " << result.output;
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

TEST(Gloo, EveryCollectiveGivesTheBitsOfLocal) {
  for (int n = 1; n <= kLargestWorld; ++n) {
    std::vector<std::string> expected(n);
    run_local(n, [&](World& world) { expected[world.rank()] = battery_report(world); });
    const auto results = run_processes({.scenario = "battery", .ranks = n, .limit = 60});
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(results[r].code, 0) << results[r].output;
      EXPECT_EQ(last_line(results[r].output), expected[r]);
    }
  }
}

TEST(Gloo, MeshOfTwoAxes) {
  for (const auto& r : run_processes({.scenario = "axes", .ranks = 4})) EXPECT_EQ(r.code, 0) << r.output;
}

/// All ranks but `culprit` end with `code` within `seconds` and say `parts`.
std::vector<ProcessResult> expect_fallout(const ProcessJob& job, int culprit, int culprit_code, int code,
                                          double seconds, const std::vector<std::string>& parts) {
  const auto results = run_processes(job);
  EXPECT_EQ(results[culprit].code, culprit_code) << results[culprit].output;
  for (int r = 0; r < job.ranks; ++r) {
    if (r == culprit) continue;
    EXPECT_EQ(results[r].code, code) << results[r].output;
    EXPECT_LT(results[r].seconds - results[culprit].seconds, seconds);
    for (const std::string& part : parts) expect_said(results[r], part);
  }
  return results;
}

TEST(Gloo, KilledPeerIsNamedWithinTwoSeconds) {
  expect_fallout({.scenario = "kill", .ranks = 3}, 1, 128 + SIGKILL, 72, 2.0,
                 {"[all_reduce] rank", "of 3: rank 1 failed: it died", "(blocks."});
  expect_fallout({.scenario = "kill0", .ranks = 3}, 0, 128 + SIGKILL, 72, 2.0, {"rank 0 failed: it died"});
}

TEST(Gloo, ThrowingPeerTellsWhatItThrew) {
  expect_fallout({.scenario = "throw", .ranks = 3}, 1, 65, 72, 2.0,
                 {"rank 1 failed: [data] token 70000 is out of vocabulary"});
  expect_fallout({.scenario = "throw_unguarded", .ranks = 3}, 1, 65, 72, 2.0, {"rank 1 failed: an exception ended it"});
  expect_fallout({.scenario = "exit", .ranks = 2}, 1, 65, 72, 2.0, {"rank 1 failed: it died"});
}

TEST(Gloo, HangEndsInATimeOutThatNamesTheMissing) {
  const auto results = run_processes({.scenario = "hang", .ranks = 3, .environment = {"SHEAF_TIMEOUT=1"}});
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 71) << r.output;
    expect_said(r, "[all_reduce] rank");
    expect_said(r, "time-out after 1.0 s at sequence 6 (blocks.");
    expect_said(r, "missing ranks: 2");
    EXPECT_LT(r.seconds, 5.0);
  }
}

TEST(Gloo, StoppedProcessIsMissing) {
  const auto results =
      run_processes({.scenario = "stopped", .ranks = 3, .environment = {"SHEAF_TIMEOUT=1"}, .limit = 4});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "missing ranks: 2");
    EXPECT_LT(results[r].seconds, 3.5);
  }
}

TEST(Gloo, RankThatLeavesEarlyIsNamed) {
  const auto results = run_processes({.scenario = "leave", .ranks = 3});
  EXPECT_EQ(results[1].code, 0) << results[1].output;
  for (int r : {0, 2}) {
    EXPECT_EQ(results[r].code, 72) << results[r].output;
    expect_said(results[r], "rank 1 failed: it has left the job");
  }
}

TEST(Gloo, DisagreementNamesBothSides) {
  for (const auto& r : run_processes({.scenario = "mismatch", .ranks = 3})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "calls all_gather f32 [1000, 1000, 1000] (blocks.1)");
    expect_said(r, "rank 1 calls reduce_scatter f32 [1000, 1000, 1000] (blocks.1)");
    EXPECT_LT(r.seconds, 3.0);
  }
  for (const auto& r : run_processes({.scenario = "skip", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "call 5");
    expect_said(r, "rank 0 calls all_reduce f32 [1000] sum (blocks.4)");
    expect_said(r, "rank 1 calls all_reduce f32 [1000] sum (blocks.5)");
  }
  for (const auto& r : run_processes({.scenario = "mismatch_all_to_all", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 1 sends 5 elements to rank 0, which expects 4");
  }
}

TEST(Rendezvous, MissingRankEndsInATimeOutThatNamesIt) {
  const auto results = run_processes(
      {.scenario = "nothing", .ranks = 3, .environment = {"SHEAF_INIT_TIMEOUT=1"}, .absent = {2}, .limit = 10});
  for (int r : {0, 1}) {
    EXPECT_EQ(results[r].code, r == 0 ? 71 : results[r].code) << results[r].output;
    EXPECT_TRUE(results[r].code == 71 || results[r].code == 72);
  }
  expect_said(results[0], "time-out after 1 s, missing ranks: 2");
}

TEST(Launcher, RunsAJob) {
  const auto r = run_processes({.scenario = "launch/4/axes", .ranks = 1, .own_variables = false})[0];
  EXPECT_EQ(r.code, 0) << r.output;
  expect_said(r, str("axes ", std::max(1, available_cores() / 4), " threads"));
}

TEST(Launcher, NamesTheFirstFailureAndReturnsItsCode) {
  struct Case {
    const char *scenario, *line;
    int code;
  };
  for (const Case& c : {Case{"launch/3/kill", "sheaf launch: rank 1 (pid ", 72},
                        Case{"launch/3/throw", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/2/exit", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/2/exit65on1", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/3/mismatch", "sheaf launch: rank ", 70}}) {
    const auto r = run_processes({.scenario = c.scenario, .ranks = 1, .own_variables = false})[0];
    EXPECT_EQ(r.code, c.code) << c.scenario << ": " << r.output;
    const std::string line = last_line(r.output);
    EXPECT_TRUE(line.starts_with(c.line)) << line;
    EXPECT_TRUE(line.ends_with(c.code == 72 ? ") was killed by signal 9" : str(") exited with code ", c.code))) << line;
    EXPECT_LT(r.seconds, 5.0) << c.scenario;
  }
}

TEST(Launcher, PassesSignalsOn) {
  const auto r = run_processes({.scenario = "launch/2/wait", .ranks = 1, .own_variables = false, .limit = 10,
                                .signal = SIGTERM, .signal_after = 1.0})[0];
  EXPECT_EQ(r.code, 128 + SIGTERM);
  EXPECT_EQ(last_line(r.output), "sheaf launch: stopped by signal 15");
  EXPECT_LT(r.seconds, 5.0);
}

TEST(Launcher, KilledLauncherTakesItsRanksAlong) {
  // The ranks hold the output pipe open for as long as they live, so this ends soon only if they die too.
  const auto start = std::chrono::steady_clock::now();
  const auto r = run_processes({.scenario = "launch/2/wait", .ranks = 1, .own_variables = false, .limit = 20,
                                .signal = SIGKILL, .signal_after = 1.0})[0];
  EXPECT_EQ(r.code, 128 + SIGKILL);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5.0);
}

TEST(Launcher, RefusesWhatCannotRun) {
  EXPECT_THROW(distributed::launch({.nproc = 0, .threads_per_rank = 0, .command = {"true"}}), ConfigError);
  EXPECT_THROW(distributed::launch({}), ConfigError);
  EXPECT_EQ(distributed::launch({.nproc = 2, .threads_per_rank = 1, .command = {"/no/such/program"}}), 64);
  EXPECT_EQ(distributed::launch({.nproc = 2, .threads_per_rank = 1, .command = {"true"}}), 0);
}

}  // namespace
}  // namespace sheaf

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "--worker=", 9) == 0) return sheaf::worker(argv[i] + 9);
  return RUN_ALL_TESTS();
}
