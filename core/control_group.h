// The control groups that bound this process: a container's, a batch system's.
#pragma once

#include <string>
#include <vector>

namespace sheaf {

struct ControlGroup {
  std::string folder;  ///< of the files with its bounds; may be missing, as a container sees no folder above its own
  int version;         ///< 1 or 2: what these files are called
};

/// The groups whose `controller` ("cpu", "memory") this process is under: its own first, then those above it. The
/// bounds of all of them apply. `root` stands for "/" in tests.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root = "");

}  // namespace sheaf
