#include "sheaf/distributed/rendezvous.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>

#include <arpa/inet.h>

#include "sheaf/core/cores.h"
#include "sheaf/core/error.h"
#include "sheaf/distributed/socket.h"

namespace sheaf {
namespace {

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* variable) const {
    const char* value = environment_(variable);
    return value && *value ? std::optional<std::string>(value) : std::nullopt;
  }

  std::optional<int> number(const char* variable, int least, int most) const {
    const auto value = text(variable);
    if (!value) return std::nullopt;
    int n = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, n);
    if (error != std::errc() || stop != end)
      fail<ConfigError>("[rendezvous] ", variable, "='", *value, "' is not a number");
    if (n < least || n > most)
      fail<ConfigError>("[rendezvous] ", variable, '=', n, " is not between ", least, " and ", most);
    return n;
  }

  int required(const char* variable, int least, int most, const char* because) const {
    const auto n = number(variable, least, most);
    if (!n) fail<ConfigError>("[rendezvous] ", because, " is set, but ", variable, " is not");
    return *n;
  }

  std::chrono::milliseconds seconds(const char* variable, std::chrono::milliseconds otherwise) const {
    const auto value = text(variable);
    if (!value) return otherwise;
    char* end = nullptr;
    const double s = std::strtod(value->c_str(), &end);
    if (*end || !(s > 0) || s > 1e8)
      fail<ConfigError>("[rendezvous] ", variable, "='", *value, "' is not a positive number of seconds");
    return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(s * 1000)));
  }

 private:
  const Environment& environment_;
};

/// A launcher's names for its variables. Slurm reports the tasks per node differently.
struct Names {
  const char *launcher, *rank, *world, *local_rank, *local_world;
};
constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
};
constexpr int kMaxRanks = 1 << 20;

/// Slurm also sets its variables in an interactive shell and in a batch script, whose commands are not ranks: only srun starts a step.
bool no_slurm_step(const Names& names, const Reader& read) {
  if (names.launcher != std::string_view("Slurm")) return false;
  const auto job = read.text("SLURM_JOB_NAME");
  return (job && (*job == "bash" || *job == "interactive")) || (!read.text("SLURM_STEP_ID") && !read.text("SLURM_STEPID"));
}

/// Entry `node` of Slurm's "2(x3),1", which reads 2, 2, 2, 1; none where there is no such entry.
std::optional<int> tasks_on_node(std::string_view list, int node) {
  while (!list.empty()) {
    const std::string entry(list.substr(0, list.find(',')));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    int tasks = 0, nodes = 1;
    if (std::sscanf(entry.c_str(), "%d(x%d)", &tasks, &nodes) < 1 || tasks < 1 || nodes < 1) return std::nullopt;
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return std::nullopt;
}

/// How many of a step's `world` tasks are on this node, if Slurm says so.
std::optional<int> slurm_tasks_here(const Reader& read, int world) {
  if (const auto list = read.text("SLURM_STEP_TASKS_PER_NODE")) {
    const auto node = read.number("SLURM_NODEID", 0, kMaxRanks);
    if (node || list->find(',') == std::string::npos)
      if (const auto tasks = tasks_on_node(*list, node.value_or(0)); tasks && *tasks <= world) return tasks;
  }
  for (const char* variable : {"SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"})
    if (const auto nodes = read.number(variable, 1, kMaxRanks)) {  // the narrower scope takes precedence
      if (*nodes == 1) return world;
      break;
    }
  // The requested number; a step may have fewer tasks.
  if (const auto asked = read.number("SLURM_NTASKS_PER_NODE", 1, kMaxRanks)) return std::min(*asked, world);
  return std::nullopt;
}

/// "node[03-07,12],other" → "node03".
std::string first_slurm_host(const std::string& list) {
  const size_t bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end == std::string::npos ? end : end - bracket - 1);
}

/// The launcher's name for this job: the same on all its ranks, and different from that of any other running job. Empty if it has
/// none: MPICH's Hydra, and variables that were set by hand.
std::string job_id(const Reader& read, std::string_view launcher) {
  const auto first = [&](std::initializer_list<const char*> variables) {
    for (const char* variable : variables)
      if (const auto value = read.text(variable)) return *value;
    return std::string();
  };
  if (launcher == "torchrun") return first({"TORCHELASTIC_RUN_ID"});
  if (launcher == "Open MPI") return first({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"});
  if (launcher == "PMI") {
    // Intel MPI's, that of srun --mpi=pmi2 and of Cray's PALS; else at least that of the allocation.
    return first({"I_MPI_HYDRA_UUID", "PMI_JOBID", "SLURM_JOB_ID"});
  }
  const std::string job = first({"SLURM_JOB_ID", "SLURM_JOBID"}), step = first({"SLURM_STEP_ID", "SLURM_STEPID"});
  return job.empty() ? job : job + '.' + step;
}

/// Jobs on one host with different ids usually get different ports. None is ephemeral on Linux.
int port_of_job(const std::string& id) {
  constexpr uint32_t kFirst = 20000, kPorts = 9000;
  uint32_t hash = 2166136261u;  // FNV-1a: the same on every host
  for (unsigned char c : id) hash = (hash ^ c) * 16777619u;
  return static_cast<int>(kFirst + hash % kPorts);
}

bool is_number(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1 || inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

std::string read_comm(const Reader& read) {
  const std::string comm = read.text("SHEAF_COMM").value_or("auto");
  if (comm != "auto" && comm != "shm" && comm != "gloo")
    fail<ConfigError>("[rendezvous] SHEAF_COMM='", comm, "' is none of auto, shm and gloo");
  return comm;
}

const char* of_process(const char* variable) { return std::getenv(variable); }

}  // namespace

Rendezvous read_rendezvous(const Environment& environment) {
  const Reader read(environment);
  Rendezvous r;
  r.comm = read_comm(read);
  r.host_id = read.text("SHEAF_HOST_ID").value_or("");
  r.init_timeout = read.seconds("SHEAF_INIT_TIMEOUT", r.init_timeout);
  r.timeout = collective_timeout(environment);

  bool same_host = true, slurm_step = false;
  for (const Names& names : kLaunchers) {
    const bool torchrun = &names == kLaunchers;
    if (!read.text(names.rank) && !(torchrun && read.text(names.world))) continue;
    if (no_slurm_step(names, read)) continue;
    r.launcher = names.launcher;
    r.world = read.required(names.world, 1, kMaxRanks, names.rank);
    r.rank = read.required(names.rank, 0, kMaxRanks, names.world);
    if (r.rank >= r.world)
      fail<ConfigError>("[rendezvous] ", names.rank, '=', r.rank, " is not below ", names.world, '=', r.world);
    auto local_world = names.local_world ? read.number(names.local_world, 1, r.world) : std::nullopt;
    auto local_rank = read.number(names.local_rank, 0, r.world - 1);
    // Slurm starts ranks through other launchers' interfaces, too: srun --mpi=pmi2.
    slurm_step = !names.local_world || read.number("SLURM_STEP_NUM_TASKS", 1, kMaxRanks) == r.world;
    if (slurm_step && !local_world) local_world = slurm_tasks_here(read, r.world);
    if (slurm_step && !local_rank) local_rank = read.number("SLURM_LOCALID", 0, r.world - 1);
    // A launcher that reports no hosts and no address uses one host.
    const bool one_host = !local_world && !read.text("MASTER_ADDR") && !read.text("SLURM_JOB_NODELIST");
    r.local_world = local_world.value_or(one_host ? r.world : 1);
    r.local_rank = local_rank.value_or(one_host ? r.rank : 0);
    same_host = r.local_world == r.world;
    if (torchrun) r.restarts = read.number("TORCHELASTIC_RESTART_COUNT", 0, INT_MAX).value_or(0);
    break;
  }
  r.threads = threads_per_rank(r.local_world, environment);
  if (r.world == 1) return r;

  r.host = read.text("MASTER_ADDR").value_or("");
  for (const char* variable : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})
    if (const auto nodes = read.text(variable); r.host.empty() && slurm_step && nodes) r.host = first_slurm_host(*nodes);
  if (r.host.empty() && !same_host)
    fail<ConfigError>("[rendezvous] the job spans several hosts, but MASTER_ADDR, rank 0's address, is not set");
  std::string id = job_id(read, r.launcher);
  if (!id.empty()) id = r.launcher + ' ' + id;
  if (!id.empty() && r.launcher != "torchrun") r.port = port_of_job(id);
  const int master_port = read.number("MASTER_PORT", 1, 65535).value_or(r.port);
  const bool agent = read.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  r.port = read.number("SHEAF_PORT", 1, 65535).value_or(master_port + (agent ? 1 : 0));
  check<ConfigError>(r.port <= 65535, "[rendezvous] SHEAF_PORT must be set: MASTER_PORT + 1 is no port");
  r.listen_fd = read.number("SHEAF_LISTEN_FD", 3, 1 << 20).value_or(-1);
  if (same_host) r.host = "127.0.0.1";
  const std::string secret = read.text("SHEAF_TOKEN").value_or("");
  const Deadline deadline = std::chrono::steady_clock::now() + r.init_timeout;
  if (!same_host && secret.empty() && !is_loopback(r.host, deadline))
    fail<ConfigError>("[rendezvous] rank 0 is at ", r.host, ", beyond loopback: set SHEAF_TOKEN to the same secret ",
                      "on all ranks");
  // Debian gives a host's own name the address 127.0.1.1. Numbers and "localhost" are meant: ranks on one host, by hand.
  const bool is_name = !is_number(r.host) && r.host != "localhost";
  if (!same_host && !secret.empty() && r.rank == 0 && is_name && is_loopback(r.host, deadline))
    fail<ConfigError>("[rendezvous] rank 0 is at ", r.host, ", which on its own host leads to loopback (see /etc/hosts there), so that no ",
                      "other host reaches it: MASTER_ADDR must be the address that others use");
  r.token = id.empty() ? secret : str(secret, '\n', id);
  return r;
}

Rendezvous read_rendezvous() { return read_rendezvous(of_process); }

int threads_per_rank(int ranks, const Environment& environment) {
  return Reader(environment)
      .number("SHEAF_THREADS_PER_RANK", 1, 65536)
      .value_or(default_threads(ranks, environment("OMP_NUM_THREADS")));
}

int threads_per_rank(int ranks) { return threads_per_rank(ranks, of_process); }

std::chrono::milliseconds collective_timeout(const Environment& environment) {
  return Reader(environment).seconds("SHEAF_TIMEOUT", std::chrono::seconds(300));
}

std::chrono::milliseconds collective_timeout() { return collective_timeout(of_process); }

std::string wanted_comm() {
  const Environment environment = of_process;
  return read_comm(Reader(environment));
}

}  // namespace sheaf
