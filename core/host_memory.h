// What this host's processes may use of its memory.
#pragma once

#include <cstdint>
#include <string>

namespace sheaf {

/// Bytes: the host's memory and swap, or less where a control group (a container, a batch system) bounds this process.
/// `root` stands for "/" in tests.
int64_t host_memory_limit(const std::string& root = "");

}  // namespace sheaf
