// Suspends processes, as a scheduler or Ctrl-Z does.
#pragma once

#include <csignal>
#include <ctime>
#include <vector>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sheaf::testing {

/// Stops `processes`, this one among them if it is named, for `seconds`.
inline void suspend(const std::vector<pid_t>& processes, double seconds) {
  const pid_t child = fork();
  if (child == 0) {  // other threads may hold locks: nothing but calls of the kernel
    for (const pid_t p : processes) kill(p, SIGSTOP);
    const auto whole = static_cast<time_t>(seconds);
    const timespec time{whole, static_cast<long>(1e9 * (seconds - static_cast<double>(whole)))};
    nanosleep(&time, nullptr);
    for (const pid_t p : processes) kill(p, SIGCONT);
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

}  // namespace sheaf::testing
