// Ranks that communicate through shared memory: what is specific to it (for the rest see processes_test).
#include <gtest/gtest.h>

#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_bits_of_local;
using testing::expect_said;
using testing::ProcessResult;
using testing::run_processes;

void expect_success(const std::vector<ProcessResult>& results, const std::string& part) {
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 0) << r.output;
    expect_said(r, part);
  }
}

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

TEST(Shm, InputsAreTheirOwnersAgainWhenACallIsOver) {
  for (const char* scenario : {"overwrite", "overwrite_wire"})
    for (const auto& r : run_processes({.scenario = scenario, .ranks = testing::kLargestWorld, .limit = 60}))
      EXPECT_EQ(r.code, 0) << scenario << ": " << r.output;
}

TEST(Shm, NothingIsLeftBehind) { expect_success(run_processes({.scenario = "leftovers", .ranks = 3}), "talks over shm"); }

}  // namespace
}  // namespace sheaf
