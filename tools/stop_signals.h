// StopSignals: records a request to stop, so that a run can save its state.
#pragma once

namespace sheaf::tools {

/// During its lifetime SIGINT, SIGTERM and SIGHUP do not end the process: the first one is recorded. Another one, at least a second
/// later, ends it at once, as by default. (An earlier one is the same request: a launcher, a batch system and a terminal may all
/// forward it.) Ignored signals stay ignored. Only one instance may exist per process.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came first; 0 if none has.
  int asked() const;
};

}  // namespace sheaf::tools
