#include "sheaf/core/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace sheaf {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

/// The number in a file of one line; kNone if there is none ("max", or no such file).
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : kNone;
}

/// Of /proc/meminfo, in bytes; 0 if it is not there.
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

/// The least bound of `group` and those above it; a group's swap is bounded apart.
int64_t bound_of(const std::string& mount, std::string group, const char* memory, const char* swap) {
  int64_t least = kNone;
  for (;;) {
    if (const int64_t bytes = number_in(mount + group + "/" + memory); bytes != kNone) {
      const int64_t more = swap ? number_in(mount + group + "/" + swap) : 0;
      least = std::min(least, more > kNone - bytes ? kNone : bytes + more);
    }
    if (group.empty()) return least;
    group.resize(std::min(group.rfind('/'), group.size() - 1));
  }
}

}  // namespace

// See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
int64_t host_memory_limit(const std::string& root) {
  int64_t limit = meminfo(root, "MemTotal") + meminfo(root, "SwapTotal");
  if (limit == 0) limit = kNone;
  std::ifstream groups(root + "/proc/self/cgroup");  // lines "number:controllers:/path"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty())
      limit = std::min(limit, bound_of(root + "/sys/fs/cgroup", path, "memory.max", "memory.swap.max"));
    else if (("," + controllers + ",").find(",memory,") != std::string::npos)
      limit = std::min(limit, bound_of(root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", nullptr));
  }
  return limit;
}

}  // namespace sheaf
