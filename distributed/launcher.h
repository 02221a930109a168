// The launcher: starts the ranks of a job on this host and runs until the last has ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace sheaf::distributed {

struct LaunchOptions {
  int nproc = 1;                     ///< ranks
  int threads_per_rank = 0;          ///< 0: as threads_per_rank(nproc) of rendezvous.h says
  bool pin = true;                   ///< pins each rank to its share of the cores, if that has at least as many as the rank has threads
  int max_restarts = 0;              ///< how often, in total, all ranks are restarted after failures that another try may cure
  std::chrono::milliseconds pause{1000};  ///< before another try
  std::vector<std::string> command;  ///< program and arguments; the program is looked up in PATH
};

/// Runs `nproc` processes of `command` with torchrun's variables, a free port on loopback and a random job token.
/// When one fails, the others get two seconds to find out by themselves, then SIGTERM, three seconds later SIGKILL. The
/// last line on standard error names the first failure that did not merely follow from another rank's:
/// "sheaf launch: rank 1 (pid 123) was killed by signal 9", "... exited with code 65: [tokens] ..." with what the rank
/// gave to tell_launcher(). What other ranks gave is printed in lines before that one, unless it says the same or merely follows from it.
/// SIGINT, SIGTERM and SIGHUP are passed on; ranks that still run 30 seconds later are killed, and at once if another signal arrives a
/// second or more after the first. If the launcher itself is killed, the kernel kills the ranks.
///
/// Another try, with another port and token, and its number in TORCHELASTIC_RESTART_COUNT, follows if max_restarts allows it and the
/// failure is not one of these, which would recur or are no failures:
///  - the exit codes 64, 65, 73, 75 and 76 of core/error.h (70 may be a GPU that failed);
///  - a command that cannot be run (64, or a shell's 126 and 127);
///  - a rank that was asked to end: SIGHUP, SIGINT or SIGTERM killed it, or it exited with 128 + the signal.
/// The failure's line says so: "...; try 2 of 4 in 1 s". After a signal to the launcher, also during a pause, there is no other try.
///
/// Returns 0, or the last try's failure's exit code (72 for a killed rank), or 128 + signal if a signal stopped the job.
/// ConfigError for bad options. Call it from a process's main thread; it waits for no other children.
int launch(const LaunchOptions& options);

/// In a process that launch() started: gives it `reason`, one line that says why this process is about to end with a
/// failure. The launcher hears all ranks and prints the line that matters. Returns false and does nothing if no launcher
/// listens (a launcher passes the file descriptor to write to in SHEAF_ERROR_FD).
bool tell_launcher(const std::string& reason);

}  // namespace sheaf::distributed
