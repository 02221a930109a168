// QuietStretch: where in what computes with a unit no activations go over the unit's lane for longest.
#pragma once

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// [Note: quiet stretches] Where sequences or tokens are shared along the axis over which parameters are sharded, activations and gathers
/// take turns on one lane, and an exchange that is waited for would wait for a gather ahead of use in front of it. With exchanges between
/// stretches of work C0, C1, .., a gather of G put in front of stretch k costs a step max(0, G - Ck): least where Ck is largest. So that
/// is where the next units are gathered: behind so many exchanges. Work is that of all ranks, so they agree;
/// where shapes are each rank's own (PerRankScope) it has no weight.
class QuietStretch {
 public:
  /// What follows on the tape is computed with a unit that is gathered along `axis` of `mesh`.
  void begin(const Tape& tape, const MeshSpec* mesh, int axis, bool weighs);
  /// Takes in what has been recorded since. What is gathered can be so where it is called: of a stretch counts what is behind the first
  /// call in it.
  void look(const Tape& tape);
  int exchanges() const { return exchanges_; }  ///< so far
  /// So many exchanges are in front of the stretch with most work, if it weighs.
  int longest() const { return stretch_ > most_ ? exchanges_ : longest_; }

 private:
  bool is_exchange(const Tape& tape, const Node& n) const;
  const MeshSpec* mesh_ = nullptr;
  int axis_ = 0, exchanges_ = 0, longest_ = 0;
  bool weighs_ = false, counts_ = true;
  NodeId seen_ = 0;
  double stretch_ = 0, most_ = 0;  // operations: of the one under way, of the longest before it
};

}  // namespace sheaf
