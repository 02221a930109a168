// The launcher: starts the ranks of a job on this host and stays until the last has ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace sheaf::distributed {

struct LaunchOptions {
  int nproc = 1;                     ///< ranks
  int threads_per_rank = 0;          ///< 0: as threads_per_rank(nproc) of rendezvous.h says
  bool pin = true;                   ///< each rank to its share of the cores, if that has as many as the rank has threads
  std::vector<std::string> command;  ///< program and arguments; the program is looked up in PATH
};

/// Runs `nproc` processes of `command` with torchrun's variables, a free port on loopback and a random job token.
/// When one fails, the others get two seconds to find out by themselves, then SIGTERM, three seconds later SIGKILL. The
/// last line on standard error names the first failure that did not merely follow from another rank's:
/// "sheaf launch: rank 1 (pid 123) was killed by signal 9", "... exited with code 65: [tokens] ..." with what the rank
/// gave to tell_launcher(). What other ranks gave stands in lines before that one, unless it says the same or merely
/// follows from it. SIGINT, SIGTERM and SIGHUP are passed on; what still runs 30
/// seconds later is killed, and at once when another comes a second later or more. If the launcher itself is killed, the kernel kills the ranks.
/// Returns 0, or that failure's exit code (72 for a killed rank), or 128 + signal if a signal stopped the job.
/// ConfigError for bad options. To be called from a process's main thread; waits for no other children.
int launch(const LaunchOptions& options);

/// In a process that launch() started: gives it `reason`, one line that says why this process is about to end with a
/// failure. The launcher hears all ranks and prints the line that matters. False, and nothing is done, where no launcher
/// listens (it leaves the file descriptor to write to in SHEAF_ERROR_FD).
bool tell_launcher(const std::string& reason);

}  // namespace sheaf::distributed
