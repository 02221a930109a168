#include "sheaf/core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "sheaf/core/control_group.h"

namespace sheaf {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

/// The number of cores that a group may use full-time: its quota over each period. kNone where it has no bound.
/// See Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst of the kernel.
int64_t bound_of(const ControlGroup& group) {
  int64_t quota = 0, period = 0;  // microseconds; "max" and -1 mean no quota
  if (group.version == 2) {
    std::ifstream(group.folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(group.folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(group.folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? (quota - 1) / period + 1 : kNone;
}

}  // namespace

std::vector<int> affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> out;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return out;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
  return out;
}

int available_cores(const std::string& root) {
  int64_t cores = static_cast<int64_t>(affinity().size());
  for (const ControlGroup& group : control_groups("cpu", root)) cores = std::min(cores, bound_of(group));
  return static_cast<int>(std::max<int64_t>(cores, 1));
}

int default_threads(int ranks, const char* told) {
  const int share = std::max(1, available_cores() / ranks), most = told ? std::atoi(told) : 0;
  return most > 0 ? std::min(share, most) : share;
}

int default_threads(int ranks) { return default_threads(ranks, std::getenv("OMP_NUM_THREADS")); }

}  // namespace sheaf
