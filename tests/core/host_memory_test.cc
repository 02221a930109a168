#include "sheaf/core/host_memory.h"

#include <gtest/gtest.h>

#include "sheaf/tests/core/fake_root.h"

namespace sheaf {
namespace {

struct Root : FakeRoot {
  Root() { write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:    10 kB\nSwapTotal:       24 kB\n"); }
};

TEST(HostMemory, IsMemoryAndSwap) {
  const Root root;
  EXPECT_EQ(host_memory_limit(root.path()), 1024 * 1024);
  EXPECT_GT(host_memory_limit(), 1 << 20);
}

TEST(HostMemory, TheLeastBoundOfTheGroupAndThoseAboveIt) {
  const Root root;
  root.write("proc/self/cgroup", "0::/user/job\n");
  root.write("sys/fs/cgroup/user/memory.max", "500000\n");
  root.write("sys/fs/cgroup/user/memory.swap.max", "100\n");
  root.write("sys/fs/cgroup/user/job/memory.max", "max\n");
  EXPECT_EQ(host_memory_limit(root.path()), 500100);
  root.write("sys/fs/cgroup/user/job/memory.max", "400000\n");
  EXPECT_EQ(host_memory_limit(root.path()), 400000 + 24 * 1024);  // the machine's swap: the job itself has no swap limit
  root.write("sys/fs/cgroup/user/job/memory.swap.max", "0\n");
  EXPECT_EQ(host_memory_limit(root.path()), 400000);
}

TEST(HostMemory, TheFirstVersionOfControlGroups) {
  const Root root;
  root.write("proc/self/cgroup", "5:devices:/\n4:cpu,memory:/not/mounted/here\n0::/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n");
  EXPECT_EQ(host_memory_limit(root.path()), 300000);
}

}  // namespace
}  // namespace sheaf
