#include "sheaf/core/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <thread>

#include "sheaf/tests/core/fake_root.h"

namespace sheaf {
namespace {

// The number of cores that the quota in the files under `root` allows, at most those of the machine.
void expect_cores(const FakeRoot& root, size_t quota) {
  EXPECT_EQ(static_cast<size_t>(available_cores(root.path())), std::min(quota, affinity().size()));
}
constexpr size_t kUnbounded = 1 << 20;

TEST(Cores, AreThoseOfTheAffinityWhereNoGroupBoundsThem) {
  const FakeRoot root;
  ASSERT_FALSE(affinity().empty());
  EXPECT_TRUE(std::ranges::is_sorted(affinity()));
  expect_cores(root, kUnbounded);
  std::thread([] {  // the affinity of a thread is its own
    cpu_set_t one;
    CPU_ZERO(&one);
    const int last = affinity().back();
    CPU_SET(last, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(affinity(), std::vector{last});
    EXPECT_EQ(available_cores(FakeRoot().path()), 1);
  }).join();
}

TEST(Cores, TheLeastQuotaOfTheGroupAndThoseAboveItRoundedUp) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/kubepods/pod/container\n");
  root.write("sys/fs/cgroup/kubepods/pod/container/cpu.max", "max 100000\n");
  expect_cores(root, kUnbounded);
  root.write("sys/fs/cgroup/kubepods/cpu.max", "200000 100000\n");
  expect_cores(root, 2);
  root.write("sys/fs/cgroup/kubepods/pod/cpu.max", "100001 100000\n");
  expect_cores(root, 2);
  root.write("sys/fs/cgroup/kubepods/pod/container/cpu.max", "50000 50000\n");
  expect_cores(root, 1);
  root.write("sys/fs/cgroup/kubepods/pod/container/cpu.max", "1000 100000\n");
  expect_cores(root, 1);
}

TEST(Cores, TheFirstVersionOfControlGroups) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "5:cpuset:/\n4:cpu,cpuacct:/docker/not/mounted/here\n0::/\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  expect_cores(root, kUnbounded);  // and no period at all
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  expect_cores(root, kUnbounded);
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n");
  expect_cores(root, 1);
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  expect_cores(root, 2);
}

TEST(Cores, WhatIsNoNumberBoundsNothing) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "garbage\n0::/\n");
  for (const char* text : {"", "max", "all of them", "100000", "100000 0", "-5 100000", "99999999999999999999 100000"}) {
    root.write("sys/fs/cgroup/cpu.max", text);
    expect_cores(root, kUnbounded);
  }
}

}  // namespace
}  // namespace sheaf
