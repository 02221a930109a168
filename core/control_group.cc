#include "sheaf/core/control_group.h"

#include <algorithm>
#include <fstream>

namespace sheaf {

// See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst of the kernel.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> out;
  std::ifstream groups(root + "/proc/self/cgroup");  // lines "number:controllers:/path"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const int version = controllers.empty() ? 2 : 1;
    if (version == 1 && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (version == 1 ? "/" + controller : "");
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    for (;;) {
      out.push_back({mount + path, version});
      if (path.empty()) break;
      path.resize(std::min(path.rfind('/'), path.size() - 1));
    }
  }
  return out;
}

}  // namespace sheaf
