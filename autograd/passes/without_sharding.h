// A step as one device would compute it (check E, in addition to those of autograd/checks.h). Sharding is a matter of types and
// redistributions, so a tape with these removed must be the tape of one rank, whatever the strategy and the number of ranks.
#pragma once

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// Forward and backward of the tape without redistributions, discards and other nodes that work on units' buffers (casts of masters,
/// slots, sums of a parameter's gradients), in order. Values that a unit's gather returns are leaves, the same in every gather; types
/// have no layouts, and values no memory. first_difference() compares two such tapes. Nodes of the update work on shards, and are
/// left out; a head with a sharded vocabulary uses other ops, which remain. PlacementError for an op that reads a unit's buffer.
Tape without_sharding(const Tape& tape);

}  // namespace sheaf
