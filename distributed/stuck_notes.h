// StuckNotes: how the members of a group that wait in a collective find out over the monitor why
// they do.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/distributed/communicator_base.h"
#include "sheaf/distributed/monitor.h"

namespace sheaf {

class StuckNotes {
 public:
  StuckNotes(const CommunicatorGroup& group, Monitor& monitor);

  /// Tells everybody that this rank waits in `call`.
  void post(const Collective& call);
  /// The call of a waiting peer that does not fit ours, beside ours; empty if all fit. `ours`: what
  /// this rank's call of a sequence number was, if it is still known.
  std::string disagreement(const Collective& call,
                           const std::function<std::optional<FlightEntry>(uint64_t)>& ours) const;
  /// Of `absent` members those to blame. Who waits here too is not; who waits in another group's
  /// collective is held up itself, and named only if nobody else is left. `knows_elsewhere`:
  /// whether the wait was long enough to tell.
  std::vector<int> missing(const Collective& call, const std::vector<int>& absent,
                           bool knows_elsewhere) const;

 private:
  const CommunicatorGroup& group_;
  Monitor& monitor_;
  const uint64_t name_hash_;
};

}  // namespace sheaf
