// Hosts: which ranks of a job share memory, and therefore how the ranks of one communicator communicate.
#pragma once

#include <string_view>
#include <vector>

namespace sheaf {

/// For each rank of the job, the lowest rank with which it shares memory, itself included. The same on all ranks.
using Hosts = std::vector<int>;

/// True if all of `members`, ranks of the job, share memory.
bool on_one_host(const Hosts& hosts, const std::vector<int>& members);

/// How the job communicates: "shm" if all ranks share memory, "gloo" if none do, else "shm+gloo": groups on one host communicate
/// through shared memory, those across hosts over Gloo.
std::string_view kind_on(const Hosts& hosts);
/// How a group in a job of this kind communicates: Communicator::kind().
std::string_view kind_of_group(std::string_view kind, const Hosts& hosts, const std::vector<int>& members);

}  // namespace sheaf
