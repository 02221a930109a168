// QuietStretch: the longest stretch of a unit's computation without activations on the unit's lane.
#pragma once

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// [Note: quiet stretches] If sequences or tokens are sharded along the axis over which parameters are sharded, activations and
/// gathers share one lane, and an exchange that a rank waits for would also wait for a prefetched gather before it. With exchanges
/// between stretches of work C0, C1, .., a gather of duration G before stretch k costs a step max(0, G - Ck): least where Ck is
/// largest. So the next units are gathered there: after k exchanges. Work is counted over all ranks, so they agree; where shapes may
/// differ between ranks (PerRankScope) it does not count.
class QuietStretch {
 public:
  /// From here on, the tape computes with a unit that is gathered along `axis` of `mesh`.
  void begin(const Tape& tape, const MeshSpec* mesh, int axis, bool weighs);
  /// Processes what has been recorded since the last call. Gathers can be issued only where this is called, so a stretch counts from
  /// the first call in it.
  void look(const Tape& tape);
  int exchanges() const { return exchanges_; }  ///< so far
  /// The number of exchanges before the stretch with the most work, if it weighs.
  int longest() const { return stretch_ > most_ ? exchanges_ : longest_; }

 private:
  bool is_exchange(const Tape& tape, const Node& n) const;
  const MeshSpec* mesh_ = nullptr;
  int axis_ = 0, exchanges_ = 0, longest_ = 0;
  bool weighs_ = false, counts_ = true;
  NodeId seen_ = 0;
  double stretch_ = 0, most_ = 0;  // operations: of the current stretch, of the longest before it
};

}  // namespace sheaf
