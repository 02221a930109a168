// StopSignals: a polite request to end is noted, so that a run can save what it has.
#pragma once

namespace sheaf::tools {

/// While this lives, SIGINT, SIGTERM and SIGHUP do not end the process: the first is noted. Another one, a second later or
/// more, ends it at once, as if this did not exist. (An earlier one is the same request: a launcher, a batch system and a
/// terminal may all pass it on.) A signal that was ignored stays so. One at a time in a process.
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
