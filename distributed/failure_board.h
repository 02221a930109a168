// FailureBoard: the first failure of a job, as far as this process knows. All communicators of the job check it, so that one failure
// poisons them all and every later message names the same cause.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "sheaf/core/error.h"

namespace sheaf {

struct JobFailure {
  int rank = 0;  ///< the rank that failed, in the world
  ExitCode code = ExitCode::kPeerLost;
  std::string reason;
};

/// Thread-safe. A failure is never taken back.
class FailureBoard {
 public:
  /// Keeps `failure` if it is the first and calls the subscribers; otherwise does nothing and returns false.
  bool raise(JobFailure failure);
  std::optional<JobFailure> failure() const;
  bool failed() const;

  /// `callback` runs on the thread that raises, and immediately if there already is a failure (so it must tolerate a second call). It
  /// must not touch the board's subscriptions. After unsubscribe() returns it is not called any more.
  int subscribe(std::function<void(const JobFailure&)> callback);
  void unsubscribe(int id);

 private:
  mutable std::mutex mutex_;
  std::optional<JobFailure> failure_;
  std::mutex subscribers_mutex_;  // held while callbacks run, so that unsubscribe() waits for them
  std::map<int, std::function<void(const JobFailure&)>> subscribers_;
  int next_id_ = 0;
};

}  // namespace sheaf
