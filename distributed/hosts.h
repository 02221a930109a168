// Hosts: which ranks of a job share memory, and so what the ranks of one communicator talk through.
#pragma once

#include <string_view>
#include <vector>

namespace sheaf {

/// By rank of the job: the lowest of the ranks that it shares memory with, itself included. The same on all ranks.
using Hosts = std::vector<int>;

/// True if all of `members`, ranks of the job, share memory.
bool on_one_host(const Hosts& hosts, const std::vector<int>& members);

/// What the job talks through: "shm" where all ranks share memory, "gloo" where none do, else "shm+gloo": groups on one
/// host talk through shared memory, those across hosts over Gloo.
std::string_view kind_on(const Hosts& hosts);
/// What a group of a job of this kind talks through: Communicator::kind().
std::string_view kind_of_group(std::string_view kind, const Hosts& hosts, const std::vector<int>& members);

}  // namespace sheaf
