// Which cores of this machine the process may use, and how many threads each rank gets where several share them.
#pragma once

#include <string>
#include <vector>

namespace sheaf {

/// The CPUs that the process may run on, as the kernel numbers them, in ascending order; none where it does not
/// tell.
std::vector<int> affinity();

/// Cores that the process may use at a time, at least 1: the CPUs that it may run on or, where that is less, the CPU
/// time that control groups (a container's, a batch system's) grant it, in whole cores, rounded up. `root` stands for
/// "/" in tests.
int available_cores(const std::string& root = "");

/// Compute threads of each of `ranks` ranks that share these cores, where no number was asked for: cores / ranks, at
/// least 1, and at most `told`, the value of OMP_NUM_THREADS (null or no positive number: no bound).
int default_threads(int ranks, const char* told);
int default_threads(int ranks);  ///< with this process's OMP_NUM_THREADS

}  // namespace sheaf
