#include "sheaf/distributed/core_shares.h"

#include <algorithm>
#include <fstream>
#include <tuple>

#include "sheaf/core/cores.h"
#include "sheaf/core/error.h"

namespace sheaf::distributed {
namespace {

// See Documentation/admin-guide/cputopology.rst of the kernel.
int topology(int cpu, const char* what, int otherwise) {
  std::ifstream file(str("/sys/devices/system/cpu/cpu", cpu, "/topology/", what));
  int value = 0;
  return file >> value ? value : otherwise;
}

bool same_core(const Cpu& a, const Cpu& b) { return a.package == b.package && a.core == b.core; }

}  // namespace

std::vector<Cpu> available_cpus() {
  std::vector<Cpu> out;
  for (int cpu : affinity()) out.push_back({cpu, topology(cpu, "physical_package_id", 0), topology(cpu, "core_id", cpu)});
  return out;
}

std::vector<std::vector<int>> core_shares(std::vector<Cpu> cpus, int ranks) {
  if (static_cast<int>(cpus.size()) < ranks) return {};
  std::ranges::sort(cpus, {}, [](const Cpu& c) { return std::tuple(c.package, c.core, c.number); });
  std::vector<size_t> begins;  // of the items distributed: cores, or CPUs if there are too few cores
  for (size_t i = 0; i < cpus.size(); ++i)
    if (i == 0 || !same_core(cpus[i], cpus[i - 1])) begins.push_back(i);
  if (static_cast<int>(begins.size()) < ranks) {
    begins.resize(cpus.size());
    for (size_t i = 0; i < cpus.size(); ++i) begins[i] = i;
  }
  const size_t units = begins.size(), n = static_cast<size_t>(ranks);
  begins.push_back(cpus.size());
  std::vector<std::vector<int>> out(n);
  for (size_t r = 0; r < n; ++r) {
    for (size_t i = begins[units * r / n]; i < begins[units * (r + 1) / n]; ++i) out[r].push_back(cpus[i].number);
    std::ranges::sort(out[r]);
  }
  return out;
}

}  // namespace sheaf::distributed
