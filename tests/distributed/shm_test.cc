// Ranks that talk through shared memory are processes: this program runs itself again, once per rank.
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>

#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_bits_of_local;
using testing::expect_fallout;
using testing::expect_said;
using testing::ProcessResult;
using testing::run_processes;

void expect_success(const std::vector<ProcessResult>& results, const std::string& part) {
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 0) << r.output;
    expect_said(r, part);
  }
}

TEST(Shm, EveryCollectiveGivesTheBitsOfLocal) { expect_bits_of_local("battery"); }
TEST(Shm, EveryCollectiveFromWireMemory) { expect_bits_of_local("battery_wire"); }
TEST(Shm, EveryCollectiveFromBothKindsOfMemory) { expect_bits_of_local("battery_mixed"); }

TEST(Shm, IsChosenByItselfOnOneHost) {
  expect_success(run_processes({.scenario = "kind", .ranks = 3}), "talks over shm");
  expect_success(run_processes({.scenario = "kind", .ranks = 2, .environment = {"SHEAF_COMM=shm"}}), "talks over shm");
  expect_success(run_processes({.scenario = "kind", .ranks = 2, .environment = {"SHEAF_COMM=gloo"}}),
                 "talks over gloo");
}

TEST(Shm, WhereOneRankCannotAllUseGlooOrRefuse) {
  expect_success(run_processes({.scenario = "kind", .ranks = 3, .environment = {"SMALL_FILES=1"}}), "talks over gloo");
  for (const auto& r : run_processes(
           {.scenario = "kind", .ranks = 3, .environment = {"SMALL_FILES=1", "SHEAF_COMM=shm"}})) {
    EXPECT_EQ(r.code, 64) << r.output;
    expect_said(r, "SHEAF_COMM=shm is impossible: rank 1: [shm] cannot size a memfd: ");
  }
  for (const auto& r : run_processes({.scenario = "kind", .ranks = 3, .environment = {"OTHER_WISH=1"}})) {
    EXPECT_EQ(r.code, 64) << r.output;
    expect_said(r, "SHEAF_COMM is auto on rank 0, but gloo on rank 1");
  }
  const auto r = run_processes({.scenario = "kind", .ranks = 1, .environment = {"SHEAF_COMM=pigeon"}})[0];
  EXPECT_EQ(r.code, 64) << r.output;
  expect_said(r, "SHEAF_COMM='pigeon' is none of auto, shm and gloo");
}

TEST(Shm, MeshOfTwoAxes) {
  const auto results = run_processes({.scenario = "axes", .ranks = 4});
  for (const auto& r : results) EXPECT_EQ(r.code, 0) << r.output;
  expect_said(results[0], ", shm");
}

TEST(Shm, InputsAreTheirOwnersAgainWhenACallIsOver) {
  for (const char* scenario : {"overwrite", "overwrite_wire"})
    for (const auto& r : run_processes({.scenario = scenario, .ranks = testing::kLargestWorld, .limit = 60}))
      EXPECT_EQ(r.code, 0) << scenario << ": " << r.output;
}

TEST(Shm, NothingIsLeftBehind) { expect_success(run_processes({.scenario = "leftovers", .ranks = 3}), "talks over shm"); }

TEST(Shm, KilledPeerIsNamedWithinTwoSeconds) {
  expect_fallout({.scenario = "kill", .ranks = 3}, 1, 128 + SIGKILL, 72, 2.0,
                 {"[all_reduce] rank", "of 3: rank 1 failed: it died", "(blocks."});
  expect_fallout({.scenario = "kill0", .ranks = 3}, 0, 128 + SIGKILL, 72, 2.0, {"rank 0 failed: it died"});
}

TEST(Shm, ThrowingPeerTellsWhatItThrew) {
  expect_fallout({.scenario = "throw", .ranks = 3}, 1, 65, 72, 2.0,
                 {"rank 1 failed: [data] token 70000 is out of vocabulary"});
  expect_fallout({.scenario = "throw_unguarded", .ranks = 3}, 1, 65, 72, 2.0, {"rank 1 failed: an exception ended it"});
  expect_fallout({.scenario = "exit", .ranks = 2}, 1, 65, 72, 2.0, {"rank 1 failed: it died"});
}

TEST(Shm, AbortReachesEverybody) {
  for (const auto& r : run_processes({.scenario = "abort", .ranks = 3})) {
    EXPECT_EQ(r.code, 72) << r.output;
    expect_said(r, "had enough");
    expect_said(r, "(twice)");
    EXPECT_LT(r.seconds, 3.0);
  }
}

TEST(Shm, HangEndsInATimeOutThatNamesTheMissing) {
  const auto results = run_processes({.scenario = "hang", .ranks = 3, .environment = {"SHEAF_TIMEOUT=1"}});
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 71) << r.output;
    expect_said(r, "[all_reduce] rank");
    expect_said(r, "time-out after 1.0 s at sequence 6 (blocks.");
    expect_said(r, "missing ranks: 2");
    EXPECT_LT(r.seconds, 5.0);
  }
}

TEST(Shm, StoppedProcessIsMissing) {
  const auto results =
      run_processes({.scenario = "stopped", .ranks = 3, .environment = {"SHEAF_TIMEOUT=1"}, .limit = 4});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "missing ranks: 2");
    EXPECT_LT(results[r].seconds, 3.5);
  }
}

TEST(Shm, WhoIsHeldUpByAnotherIsNotBlamed) {
  const auto results =
      run_processes({.scenario = "held_up", .ranks = 4, .environment = {"SHEAF_TIMEOUT=2"}, .limit = 6});
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "missing ranks: 3");
  }
}

TEST(Shm, RankThatLeavesEarlyIsNamed) {
  const auto results = run_processes({.scenario = "leave", .ranks = 3});
  EXPECT_EQ(results[1].code, 0) << results[1].output;
  for (int r : {0, 2}) {
    EXPECT_EQ(results[r].code, 72) << results[r].output;
    expect_said(results[r], "rank 1 failed: it has left the job");
  }
}

TEST(Shm, DisagreementNamesBothSides) {
  for (const auto& r : run_processes({.scenario = "mismatch", .ranks = 3})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 0 calls all_gather f32 [1000, 1000, 1000] (blocks.1)");
    expect_said(r, "rank 1 calls reduce_scatter f32 [1000, 1000, 1000] (blocks.1)");
    EXPECT_LT(r.seconds, 3.0);
  }
  for (const auto& r : run_processes({.scenario = "skip", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 0 calls all_reduce f32 [1000] sum (blocks.4)");
    expect_said(r, "rank 1 calls all_reduce f32 [1000] sum (blocks.5)");
    expect_said(r, "at sequence 5");
  }
  for (const auto& r : run_processes({.scenario = "mismatch_all_to_all", .ranks = 2})) {
    EXPECT_EQ(r.code, 70) << r.output;
    expect_said(r, "rank 1 sends 5 elements to rank 0, which expects 4");
  }
}

}  // namespace
}  // namespace sheaf

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "--worker=", 9) == 0) return sheaf::testing::run_scenario(argv[i] + 9);
  return RUN_ALL_TESTS();
}
