// How much of its memory this host lets processes use.
#pragma once

#include <cstdint>
#include <string>

namespace sheaf {

/// Bytes: the host's memory and swap, or less where a control group (a container, a batch system) bounds this process.
/// `root` stands for "/" in tests.
int64_t host_memory_limit(const std::string& root = "");

}  // namespace sheaf
