#include "sheaf/distributed/core_shares.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

namespace sheaf::distributed {
namespace {

using Shares = std::vector<std::vector<int>>;

// Two packages of two cores with two hardware threads, numbered as Linux does: all first threads, then the second ones.
const std::vector<Cpu> kServer{{0, 0, 0}, {1, 0, 1}, {2, 1, 0}, {3, 1, 1}, {4, 0, 0}, {5, 0, 1}, {6, 1, 0}, {7, 1, 1}};

TEST(CoreShares, ThreadsOfACoreAndCoresOfAPackageStayTogether) {
  EXPECT_EQ(core_shares(kServer, 1), (Shares{{0, 1, 2, 3, 4, 5, 6, 7}}));
  EXPECT_EQ(core_shares(kServer, 2), (Shares{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(core_shares(kServer, 3), (Shares{{0, 4}, {1, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(core_shares(kServer, 4), (Shares{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(CoreShares, HardwareThreadsAreDealtOutWhereCoresAreTooFew) {
  EXPECT_EQ(core_shares(kServer, 8), (Shares{{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}}));
  EXPECT_EQ(core_shares(kServer, 9), Shares{});
}

TEST(CoreShares, EveryCpuHasOneRankAndSharesDifferByOneCoreAtMost) {
  std::vector<Cpu> cpus;
  for (int i = 0; i < 48; ++i) cpus.push_back({i, i % 24 / 12, i % 12});
  for (int ranks = 1; ranks <= 24; ++ranks) {
    std::set<int> seen;
    size_t least = 48, most = 0;
    for (const std::vector<int>& share : core_shares(cpus, ranks)) {
      EXPECT_TRUE(std::ranges::is_sorted(share));
      seen.insert(share.begin(), share.end());
      least = std::min(least, share.size()), most = std::max(most, share.size());
    }
    EXPECT_EQ(seen.size(), 48u) << ranks;
    EXPECT_LE(most, least + 2) << ranks;
  }
}

TEST(CoreShares, ThisMachineHasCpus) {
  const std::vector<Cpu> cpus = available_cpus();
  ASSERT_FALSE(cpus.empty());
  EXPECT_EQ(core_shares(cpus, 1)[0].size(), cpus.size());
}

}  // namespace
}  // namespace sheaf::distributed
