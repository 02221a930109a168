// Which cores of this machine the process may use, and how many threads of ranks that share them.
#pragma once

#include <string>
#include <vector>

namespace sheaf {

/// The CPUs that the process may run on, as the kernel numbers them, in rising order; none where it does not tell.
std::vector<int> affinity();

/// Cores that the process may use at a time, at least 1: the CPUs that it may run on or, where that is less, those whose
/// whole time control groups (a container's, a batch system's) let it have, rounded up. `root` stands for "/" in tests.
int available_cores(const std::string& root = "");

/// Compute threads of each of `ranks` ranks that share these cores, where nobody asked for a number: cores / ranks, at
/// least 1, and no more than `told`, what OMP_NUM_THREADS says (null or no positive number: nothing).
int default_threads(int ranks, const char* told);
int default_threads(int ranks);  ///< by this process's OMP_NUM_THREADS

}  // namespace sheaf
