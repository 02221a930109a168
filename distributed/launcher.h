// The launcher: starts the ranks of a job on this host and waits until all have ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace sheaf::distributed {

struct LaunchOptions {
  int nproc = 1;                          ///< ranks
  int threads_per_rank = 0;               ///< 0: as threads_per_rank(nproc) of rendezvous.h says
  bool pin = true;                        ///< pins each rank to its share of the cores, if it has at least as many cores as threads
  int max_restarts = 0;                   ///< how often, in total, all ranks are restarted after failures that a retry may fix
  std::chrono::milliseconds pause{1000};  ///< before a retry
  std::vector<std::string> command;       ///< program and arguments; the program is looked up in PATH
};

/// Runs `nproc` processes of `command` with torchrun's variables, a free port on loopback and a random job token. When one fails, the
/// others get two seconds to notice and exit by themselves, then SIGTERM, three seconds later SIGKILL. The last line on standard
/// error names the first failure that did not merely follow from another rank's: "sheaf launch: rank 1 (pid 123) was killed by signal
/// 9", "... exited with code 65: [tokens] ..." with the text that the rank passed to tell_launcher(). Other ranks' texts are printed
/// in lines before that one, unless they are the same or merely follow from it. SIGINT, SIGTERM and SIGHUP are passed on; ranks that
/// still run 30 seconds later are killed, and at once if another signal arrives a second or more after the first. If the launcher
/// itself is killed, the kernel kills the ranks.
///
/// A retry, with another port and token, and its number in TORCHELASTIC_RESTART_COUNT, follows if max_restarts allows it, unless the
/// failure would recur or is none:
///  - the exit codes 64, 65, 73, 75 and 76 of core/error.h (70 may be a GPU that failed);
///  - a command that cannot be run (64, or a shell's 126 and 127);
///  - a rank that was asked to end: SIGHUP, SIGINT or SIGTERM killed it, it exited with 128 + the signal, or its text begins with
///    after_signal(), as of one that could not save its state.
/// The failure's line announces it: "...; try 2 of 4 in 1 s". After a signal to the launcher, also during a pause, there is no retry.
///
/// Returns 0, or the last try's failure's exit code (72 for a killed rank), or 128 + signal if a signal stopped the job.
/// ConfigError for bad options. Call it from a process's main thread; it waits for no other children.
int launch(const LaunchOptions& options);

/// In a process started by launch(): passes it `reason`, one line that says why this process is about to fail. The launcher collects
/// the reasons of all ranks and prints the relevant one. Returns false and does nothing if no launcher listens (a launcher passes the
/// file descriptor to write to in SHEAF_ERROR_FD).
bool tell_launcher(const std::string& reason);

/// "after signal 15: ", with which the reason of a process begins that fails after it was asked to end.
std::string after_signal(int signal);

}  // namespace sheaf::distributed
