// Gloo ranks are processes: this program runs itself again, once per rank, with --worker=<scenario>.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "sheaf/distributed/launcher.h"
#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_bits_of_local;
using testing::expect_fallout;
using testing::expect_said;
using testing::last_line;
using testing::run_processes;

TEST(Gloo, EveryCollectiveGivesTheBitsOfLocal) { expect_bits_of_local("battery"); }

TEST(Gloo, MeshOfTwoAxes) {
  for (const auto& r : run_processes({.scenario = "axes", .ranks = 4})) EXPECT_EQ(r.code, 0) << r.output;
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
  expect_said(r, str("axes ", std::max(1, available_cores() / 4), " threads, gloo"));
}

TEST(Launcher, GivesEachRankCoresOfItsOwn) {
  if (available_cores() < 2) GTEST_SKIP() << "one core for two ranks";
  const auto r = run_processes({.scenario = "launch/2/pinned", .ranks = 1, .own_variables = false})[0];
  EXPECT_EQ(r.code, 0) << r.output;
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
  setenv("SHEAF_COMM", "gloo", 1);  // for the ranks, too
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "--worker=", 9) == 0) return sheaf::testing::run_scenario(argv[i] + 9);
  return RUN_ALL_TESTS();
}
