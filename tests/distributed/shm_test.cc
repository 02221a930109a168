// Ranks that communicate through shared memory: what is specific to it (for the rest see processes_test).
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sheaf/distributed/shm_segment.h"
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

// As all memfds are where vm.memfd_noexec is 1.
TEST(Shm, SegmentsMayBeSealedAgainstExecution) {
  constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL
  for (const int seals : {kSizeSeals, int{F_SEAL_SEAL}}) {
    Socket memory(memfd_create("sheaf-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
    if (!memory) GTEST_SKIP() << "not run: this kernel has no such seal";
    ASSERT_EQ(ftruncate(memory.fd(), ShmSegment::kControlBytes + 4096), 0);
    ASSERT_EQ(fcntl(memory.fd(), F_ADD_SEALS, seals), 0);
    if (seals == kSizeSeals) EXPECT_NE(ShmSegment::map(std::move(memory)), nullptr);
    else EXPECT_THROW(ShmSegment::map(std::move(memory)), IoError);
  }
}

TEST(Shm, NothingIsLeftBehind) { expect_success(run_processes({.scenario = "leftovers", .ranks = 3}), "talks over shm"); }

}  // namespace
}  // namespace sheaf
