// Jobs over several hosts: groups of ranks on one host communicate through its memory, the others over Gloo. HOSTS=aab says which ranks
// share a host; two_hosts_test has hosts that the system isolates.
#include "sheaf/distributed/hosts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>

#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_fallout;
using testing::expect_said;
using testing::kSoon;
using testing::last_line;
using testing::ProcessResult;
using testing::run_processes;

using Words = std::vector<std::string>;

void expect_success(const std::vector<ProcessResult>& results, const std::string& part) {
  for (const auto& r : results) {
    EXPECT_EQ(r.code, 0) << r.output;
    expect_said(r, part);
  }
}

/// All collectives on both axes of the grid have the bits that ranks in one process have. `kinds`: each rank's transports on its axes.
void expect_bits_on_grid(const Words& environment, const Words& kinds) {
  SCOPED_TRACE(environment[0]);
  const int ranks = static_cast<int>(kinds.size());
  Words expected(kinds.size());
  run_local(ranks, [&](World& world) { expected[world.rank()] = testing::grid_report(world); });
  const auto results = run_processes({.scenario = "grid", .ranks = ranks, .environment = environment, .limit = 60});
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(results[r].code, 0) << results[r].output;
    expect_said(results[r], kinds[r]);
    EXPECT_EQ(last_line(results[r].output), expected[r]);
  }
}

constexpr const char* kWithin = "shm+gloo: data gloo, model shm";
constexpr const char* kAcross = "shm+gloo: data shm, model gloo";
constexpr const char* kBoth = "shm+gloo: data shm, model shm";
constexpr const char* kNeither = "shm+gloo: data gloo, model gloo";

TEST(Hosts, EveryGroupGivesTheBitsOfLocal) {
  expect_bits_on_grid({"HOSTS=aabb"}, {kWithin, kWithin, kWithin, kWithin});
  expect_bits_on_grid({"HOSTS=abab"}, {kAcross, kAcross, kAcross, kAcross});
  expect_bits_on_grid({"SHEAF_COMM=gloo", "HOSTS=aabb"}, Words(4, "gloo: data gloo, model gloo"));
  expect_bits_on_grid({"SHEAF_COMM=shm"}, Words(4, "shm: data shm, model shm"));
}

TEST(Hosts, UnevenOnesHaveBothKindsOnOneAxis) {
  expect_bits_on_grid({"HOSTS=aaab"}, {kBoth, kWithin, kAcross, kNeither});
  expect_bits_on_grid({"HOSTS=aabbbb"}, {kNeither, kNeither, kAcross, kWithin, kWithin, kBoth});
}

TEST(Hosts, AreFoundOutTogether) {
  const auto run = [](int ranks, Words environment) {
    return run_processes({.scenario = "kind", .ranks = ranks, .environment = std::move(environment)});
  };
  expect_success(run(3, {"HOSTS=aab"}), "talks over shm+gloo");
  expect_success(run(3, {"HOSTS=baa"}), "talks over shm+gloo");
  expect_success(run(3, {"HOSTS=abc"}), "talks over gloo");
  expect_success(run(3, {"HOSTS=aaa"}), "talks over shm");
  for (const auto& r : run(3, {"HOSTS=aab", "SHEAF_COMM=shm"})) {
    EXPECT_EQ(r.code, 64) << r.output;
    expect_said(r, "SHEAF_COMM=shm is impossible: rank 2 and rank 0 are on different hosts");
  }
}

TEST(Hosts, WhereOneRankCannotItsHostAloneUsesGloo) {
  const auto expect_kinds = [](const char* hosts, const Words& kinds) {
    const auto results = run_processes({.scenario = "grid_kinds", .ranks = 4, .environment = {hosts, "SMALL_FILES=1"}});
    for (size_t r = 0; r < kinds.size(); ++r) {
      EXPECT_EQ(results[r].code, 0) << results[r].output;
      expect_said(results[r], kinds[r]);
    }
  };
  expect_kinds("HOSTS=aabb", {kNeither, kNeither, kWithin, kWithin});
  expect_kinds("HOSTS=aaab", Words(4, "gloo: data gloo, model gloo"));
}

TEST(Hosts, KilledPeerIsNamedToAll) {
  expect_fallout({.scenario = "grid_kill", .ranks = 4, .environment = {"HOSTS=aabb"}}, 3, 128 + SIGKILL, 72, kSoon,
                 {"[all_reduce] rank", "rank 3 failed: it died"});
  expect_fallout({.scenario = "kill", .ranks = 3, .environment = {"HOSTS=aab"}}, 1, 128 + SIGKILL, 72, kSoon,
                 {"rank 1 failed: it died"});
  expect_fallout({.scenario = "grid_throw", .ranks = 4, .environment = {"HOSTS=aabb"}}, 3, 65, 72, kSoon,
                 {"rank 3 failed: [data] token 70000 is out of vocabulary"});
}

// The rank that notices it tells those that wait in groups of the other kind.
TEST(Hosts, HangEndsInATimeOutThatNamesTheMissing) {
  for (const char* scenario : {"grid_hang_in_row", "grid_hang_in_column"})
    for (const auto& r : run_processes(
             {.scenario = scenario, .ranks = 4, .environment = {"HOSTS=aabb", "SHEAF_TIMEOUT=4"}})) {
      EXPECT_EQ(r.code, 71) << scenario << ": " << r.output;
      expect_said(r, "time-out after 4.0 s at sequence 1 (hang), missing ranks: 3");
    }
}

TEST(Hosts, WhoIsHeldUpByAnotherKindOfGroupIsNotBlamed) {
  struct Case {
    const char *scenario, *hosts;
    int ranks;
    std::vector<int> stopped;
    const char* missing;
  };
  for (const Case& c : {Case{"grid_held_up_in_row", "HOSTS=aabb", 4, {3}, "missing ranks: 3"},
                        Case{"grid_held_up_in_column", "HOSTS=aaabbb", 6, {2, 4}, "missing ranks: 2"}}) {
    const auto results = run_processes(
        {.scenario = c.scenario, .ranks = c.ranks, .environment = {c.hosts, "SHEAF_TIMEOUT=5"}});
    for (int r = 0; r < c.ranks; ++r) {
      if (std::ranges::count(c.stopped, r) > 0) continue;
      EXPECT_EQ(results[r].code, 71) << c.scenario << ": " << results[r].output;
      expect_said(results[r], c.missing);
    }
  }
}

TEST(Hosts, NothingIsLeftBehind) {
  expect_success(run_processes({.scenario = "leftovers", .ranks = 3, .environment = {"HOSTS=aab"}}),
                 "talks over shm+gloo");
}

TEST(Hosts, KindOfAJobAndOfItsGroups) {
  EXPECT_EQ(kind_on({0, 0, 0}), "shm");
  EXPECT_EQ(kind_on({0, 1, 2}), "gloo");
  EXPECT_EQ(kind_on({0, 1, 0}), "shm+gloo");
  EXPECT_EQ(kind_on({0, 1, 1}), "shm+gloo");
  EXPECT_EQ(kind_of_group("shm+gloo", {0, 1, 0, 1}, {1, 3}), "shm");
  EXPECT_EQ(kind_of_group("shm+gloo", {0, 1, 0, 1}, {0, 1}), "gloo");
  EXPECT_EQ(kind_of_group("gloo", {0, 0}, {0, 1}), "gloo");
}

}  // namespace
}  // namespace sheaf
