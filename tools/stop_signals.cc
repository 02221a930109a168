#include "sheaf/tools/stop_signals.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace sheaf::tools {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr int64_t kSameRequest = 1'000'000'000;  // ns

// A handler can access only globals.
std::atomic<int> first_signal{0};
std::atomic<int64_t> first_at{0};
struct sigaction previous[std::size(kSignals)];

int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Async-signal-safe.
void note(int signal) {
  if (first_signal == 0) {
    first_at = now();
    first_signal = signal;
  } else if (now() - first_at >= kSameRequest) {
    std::signal(signal, SIG_DFL);
    raise(signal);  // delivered when this returns
  }
}

}  // namespace

StopSignals::StopSignals() {
  first_signal = 0;
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (int s : kSignals) sigaddset(&action.sa_mask, s);  // one at a time
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    sigaction(kSignals[i], nullptr, &previous[i]);
    if (previous[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

int StopSignals::asked() const { return first_signal; }

}  // namespace sheaf::tools
