#include "sheaf/core/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "sheaf/core/control_group.h"

namespace sheaf {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

/// The number in a file of one line; kNone if there is none ("max", or no such file).
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : kNone;
}

/// A field of /proc/meminfo, in bytes; 0 if it does not exist.
int64_t meminfo(const std::string& root, const std::string& field) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":")) {
      std::istringstream rest(line.substr(field.size() + 1));
      int64_t kibibytes = 0;
      return rest >> kibibytes ? kibibytes * 1024 : 0;
    }
  return 0;
}

/// The memory limit of a group, where the host has `swap` bytes of swap; the group's swap has a separate limit, which may exceed
/// that.
int64_t bound_of(const ControlGroup& group, int64_t swap) {
  if (group.version == 1) return number_in(group.folder + "/memory.limit_in_bytes");
  const int64_t bytes = number_in(group.folder + "/memory.max");
  swap = std::min(swap, number_in(group.folder + "/memory.swap.max"));
  return swap > kNone - bytes ? kNone : bytes + swap;
}

}  // namespace

// See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
int64_t host_memory_limit(const std::string& root) {
  const int64_t swap = meminfo(root, "SwapTotal");
  int64_t limit = meminfo(root, "MemTotal") + swap;
  if (limit == 0) limit = kNone;
  for (const ControlGroup& group : control_groups("memory", root)) limit = std::min(limit, bound_of(group, swap));
  return limit;
}

}  // namespace sheaf
