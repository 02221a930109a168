// How a process learns its job and rank: from the environment variables that its launcher set.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace sheaf {

struct Rendezvous {
  std::string launcher;  ///< "torchrun", "Open MPI", "PMI" or "Slurm"; empty: none, a single rank
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int local_world = 1;             ///< ranks on this host
  std::string host = "127.0.0.1";  ///< where rank 0 serves the store
  int port = 29500;
  std::string token;            ///< SHEAF_TOKEN and the launcher's name of the job, so that ranks of two jobs never connect
  int listen_fd = -1;           ///< SHEAF_LISTEN_FD: a socket that listens on `port`, inherited from the launcher
  int restarts = 0;             ///< TORCHELASTIC_RESTART_COUNT: how often torchrun or `sheaf launch` started this job again
  int threads = 1;              ///< per rank: threads_per_rank(local_world)
  std::string comm = "auto";    ///< SHEAF_COMM: "shm", "gloo", or "auto": shm within hosts, gloo between them
  std::string host_id;          ///< SHEAF_HOST_ID: ranks with different ones share no memory, as if on different hosts
  std::chrono::milliseconds init_timeout{300'000};  ///< SHEAF_INIT_TIMEOUT, in seconds
  std::chrono::milliseconds timeout{300'000};       ///< SHEAF_TIMEOUT: collective_timeout()
};

using Environment = std::function<const char*(const char*)>;

/// Reads torchrun's variables (RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT), else Open MPI's, PMI's, Slurm's.
/// The store is at MASTER_ADDR:MASTER_PORT, or SHEAF_PORT if set; under torchrun, whose agent occupies MASTER_PORT
/// (TORCHELASTIC_USE_AGENT_STORE=True), at SHEAF_PORT, by default MASTER_PORT + 1. Without any of them the port is derived from the
/// launcher's id of the job, and is 29500 if there is none. If all ranks are on this host the store listens on loopback only;
/// otherwise SHEAF_TOKEN is required, and the name of rank 0's host must not lead to loopback there. ConfigError names what is missing
/// or wrong.
Rendezvous read_rendezvous(const Environment& environment);
Rendezvous read_rendezvous();  ///< of this process

/// Compute threads of each of `ranks` ranks on this host: SHEAF_THREADS_PER_RANK, else default_threads() of core/cores.h, for which
/// OMP_NUM_THREADS is an upper bound.
int threads_per_rank(int ranks, const Environment& environment);
int threads_per_rank(int ranks);  ///< of this process

/// How long one collective may take: SHEAF_TIMEOUT, else 300 s. ConfigError unless it is a positive number of seconds.
std::chrono::milliseconds collective_timeout(const Environment& environment);
std::chrono::milliseconds collective_timeout();  ///< of this process

/// SHEAF_COMM of this process: "auto", "shm" or "gloo"; ConfigError for anything else.
std::string wanted_comm();

}  // namespace sheaf
