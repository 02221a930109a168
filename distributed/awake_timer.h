// AwakeTimer: how long a wait has lasted, without the time in which this process was stopped.
#pragma once

#include <algorithm>
#include <chrono>

namespace sheaf {

/// A job may be suspended as a whole, by a scheduler or Ctrl-Z, for longer than a collective may take. Clocks go on meanwhile; what
/// this timer was not looked at for counts as at most kLongestLook. So whoever waits looks more often than that.
/// Not thread-safe.
class AwakeTimer {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kLongestLook{1};

  /// The time since the timer was made.
  Clock::duration look() {
    const auto now = Clock::now();
    waited_ += std::min<Clock::duration>(now - seen_, kLongestLook);
    seen_ = now;
    return waited_;
  }

 private:
  Clock::time_point seen_ = Clock::now();
  Clock::duration waited_{0};
};

}  // namespace sheaf
