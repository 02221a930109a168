// Which CPUs each rank of a host runs on.
#pragma once

#include <vector>

namespace sheaf::distributed {

/// A CPU as the kernel numbers it, and the core it is a hardware thread of.
struct Cpu {
  int number = 0, package = 0, core = 0;
};

/// The CPUs of affinity() (core/cores.h); package and core are 0 and the CPU's number if the system does not provide them.
std::vector<Cpu> available_cpus();

/// Divides `cpus` among `ranks`, numbers in ascending order: neighbours in a package go to one rank, hardware threads of a core stay
/// together if there are at least as many cores as ranks, and shares differ by at most one core, or one CPU. Empty if there are fewer
/// CPUs than ranks.
std::vector<std::vector<int>> core_shares(std::vector<Cpu> cpus, int ranks);

}  // namespace sheaf::distributed
