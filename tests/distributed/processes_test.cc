// What holds for ranks that are processes, over any transport.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_bits_of_local;
using testing::expect_fallout;
using testing::expect_said;
using testing::kSoon;
using testing::run_processes;

/// The parameter is the transport: with "shm+gloo" rank 0 is on a host of its own, and groups of all ranks communicate over Gloo.
class Processes : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "shm+gloo") setenv("HOSTS", "abbbb", 1);
    else setenv("SHEAF_COMM", GetParam().c_str(), 1);
  }
  void TearDown() override {
    unsetenv("SHEAF_COMM");
    unsetenv("HOSTS");
  }
  static bool over_gloo() { return GetParam() != "shm"; }
};

TEST_P(Processes, EveryCollectiveGivesTheBitsOfLocal) { expect_bits_of_local("battery"); }

TEST_P(Processes, MeshOfTwoAxes) {
  const auto results = run_processes({.scenario = "axes", .ranks = 4});
  for (const auto& r : results) EXPECT_EQ(r.code, 0) << r.output;
  expect_said(results[0], str(", ", GetParam()));
}

TEST_P(Processes, KilledPeerIsNamedSoon) {
  expect_fallout({.scenario = "kill", .ranks = 3}, 1, 128 + SIGKILL, 72, kSoon,
                 {"[all_reduce] rank", "of 3: rank 1 failed: it died", "(blocks."});
  expect_fallout({.scenario = "kill0", .ranks = 3}, 0, 128 + SIGKILL, 72, kSoon, {"rank 0 failed: it died"});
}

TEST_P(Processes, ThrowingPeerTellsWhatItThrew) {
  expect_fallout({.scenario = "throw", .ranks = 3}, 1, 65, 72, kSoon,
                 {"rank 1 failed: [data] token 70000 is out of vocabulary"});
  expect_fallout({.scenario = "throw_unguarded", .ranks = 3}, 1, 65, 72, kSoon, {"rank 1 failed: an exception ended it"});
  expect_fallout({.scenario = "exit", .ranks = 2}, 1, 65, 72, kSoon, {"rank 1 failed: it died"});
}

TEST_P(Processes, WhoFailsBeforeItConnectsIsNotWaitedFor) {
  expect_fallout({.scenario = "no_mesh", .ranks = 3}, 1, 65, 72, kSoon, {"rank 1 failed: [corpus] missing"});
}

TEST_P(Processes, AbortReachesEverybody) {
  for (const auto& r : run_processes({.scenario = "abort", .ranks = 3})) {
    EXPECT_EQ(r.code, 72) << r.output;
    expect_said(r, "had enough");
    // A Gloo barrier may be over on one rank, which then aborts, while another still waits in it.
    if (!over_gloo()) expect_said(r, "(twice)");
    EXPECT_LT(r.seconds, kSoon);
  }
}

TEST_P(Processes, HangEndsInATimeOutThatNamesTheMissing) {
  const auto results = run_processes({.scenario = "hang", .ranks = 3, .environment = {"SHEAF_TIMEOUT=3"}});
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 71) << r.output;
    expect_said(r, "[all_reduce] rank");
    expect_said(r, "time-out after 3.0 s at sequence 6 (blocks.");
    expect_said(r, "missing ranks: 2");
  }
}

TEST_P(Processes, ACallWithoutADeadlineWaits) {
  for (const auto& r : run_processes({.scenario = "patient", .ranks = 3, .environment = {"SHEAF_TIMEOUT=3"}})) {
    EXPECT_EQ(r.code, 71) << r.output;
    expect_said(r, "time-out after 3.0 s at sequence 2 (hang)");
  }
}

TEST_P(Processes, ACallWithoutADeadlineWaitsOnlyForTheLiving) {
  const auto results = run_processes({.scenario = "stopped_before_a_patient_call", .ranks = 3, .environment = {"SHEAF_TIMEOUT=3"}});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "rank 2 failed: it has given no sign of life for 3 s");
    expect_said(results[r], "(patient)");
  }
}

TEST_P(Processes, TimeInWhichTheWholeJobIsSuspendedDoesNotCount) {
  for (const auto& r : run_processes({.scenario = "suspended", .ranks = 3, .environment = {"SHEAF_TIMEOUT=3"}, .goes_on = true})) {
    EXPECT_EQ(r.code, 71) << r.output;
    expect_said(r, "time-out after 3.0 s at sequence 3 (hang), missing ranks: 2");
  }
}

TEST_P(Processes, StoppedProcessIsMissing) {
  const auto results = run_processes({.scenario = "stopped", .ranks = 3, .environment = {"SHEAF_TIMEOUT=3"}});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "missing ranks: 2");
  }
}

TEST_P(Processes, WhoIsHeldUpByAnotherIsNotBlamed) {
  const auto results = run_processes({.scenario = "held_up", .ranks = 4, .environment = {"SHEAF_TIMEOUT=5"}});
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "missing ranks: 3");
  }
}

TEST_P(Processes, RankThatLeavesEarlyIsNamed) {
  const auto results = run_processes({.scenario = "leave", .ranks = 3});
  EXPECT_EQ(results[1].code, 0) << results[1].output;
  for (int r : {0, 2}) {
    EXPECT_EQ(results[r].code, 72) << results[r].output;
    expect_said(results[r], "rank 1 failed: it has left the job");
  }
}

TEST_P(Processes, DisagreementNamesBothSides) {
  for (const auto& r : run_processes({.scenario = "mismatch", .ranks = 3})) {
    EXPECT_EQ(r.code, 70) << r.output;
    // Over Gloo the rank that detects it names itself and its neighbour.
    expect_said(r, str(over_gloo() ? "" : "rank 0 ", "calls all_gather f32 [1000, 1000, 1000] (blocks.1)"));
    expect_said(r, "rank 1 calls reduce_scatter f32 [1000, 1000, 1000] (blocks.1)");
    EXPECT_LT(r.seconds, kSoon);
  }
  for (const auto& r : run_processes({.scenario = "skip", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 0 calls all_reduce f32 [1000] sum (blocks.4)");
    expect_said(r, "rank 1 calls all_reduce f32 [1000] sum (blocks.5)");
    expect_said(r, over_gloo() ? "call 5" : "at sequence 5");
  }
  for (const auto& r : run_processes({.scenario = "mismatch_all_to_all", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 1 sends 5 elements to rank 0, which expects 4");
  }
}

TEST(Gloo, WhoDiesWhileItConnectsIsNamed) {
  expect_fallout({.scenario = "die_connecting", .ranks = 3, .environment = {"SHEAF_COMM=gloo", "SHEAF_INIT_TIMEOUT=10"}}, 1, 128 + SIGKILL, 72, 2 * kSoon,
                 {"[mesh] rank", "of 3: rank 1 failed: it died"});
}

INSTANTIATE_TEST_SUITE_P(Over, Processes, ::testing::Values("gloo", "shm", "shm+gloo"),
                         [](const auto& info) { return info.param == "shm+gloo" ? "both" : info.param; });

}  // namespace
}  // namespace sheaf
