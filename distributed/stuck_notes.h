// StuckNotes: how members of a group that are blocked in a collective find out why, over the monitor.
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

  /// Tells all ranks that this rank waits in `call`.
  void post(const Collective& call);
  /// A waiting peer's call that does not match ours, next to ours; empty if all match. `ours` gives this rank's
  /// call with a sequence number, if still known.
  std::string disagreement(const Collective& call,
                           const std::function<std::optional<FlightEntry>(uint64_t)>& ours) const;
  /// The members of `absent` to blame. Members that wait in this call, too, are not; those that wait in another group's collective
  /// are blocked themselves, and are named only if there is no other candidate. `knows_elsewhere`: whether the wait was long enough
  /// to tell.
  std::vector<int> missing(const Collective& call, const std::vector<int>& absent,
                           bool knows_elsewhere) const;

 private:
  const CommunicatorGroup& group_;
  Monitor& monitor_;
  const uint64_t name_hash_;
};

}  // namespace sheaf
