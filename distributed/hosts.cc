#include "sheaf/distributed/hosts.h"

#include <algorithm>

namespace sheaf {

bool on_one_host(const Hosts& hosts, const std::vector<int>& members) {
  return std::ranges::all_of(members, [&](int r) { return hosts[r] == hosts[members[0]]; });
}

std::string_view kind_on(const Hosts& hosts) {
  if (std::ranges::count(hosts, 0) == std::ssize(hosts)) return "shm";
  for (int r = 0; r < std::ssize(hosts); ++r)
    if (hosts[r] != r) return "shm+gloo";
  return "gloo";
}

std::string_view kind_of_group(std::string_view kind, const Hosts& hosts, const std::vector<int>& members) {
  if (kind != "shm+gloo") return kind;
  return on_one_host(hosts, members) ? "shm" : "gloo";
}

}  // namespace sheaf
