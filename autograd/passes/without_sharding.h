// A step as one device would compute it (check E, beside those of autograd/checks.h). Sharding is a matter of types and redistributions, so what
// is left of a tape without them must be the tape of one rank, whatever the strategy and the number of ranks.
#pragma once

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// Forward and backward of the tape without redistributions, discards and what else deals with units' buffers (casts of
/// masters, slots, sums of a parameter's gradients), in order. Values that a unit was opened to are leaves, the same at every
/// opening; types have no layouts, and nothing says where values lie. first_difference() compares two of them. Nodes of the
/// update work on shards, and are left out; a head whose vocabulary is cut has ops of its own, which stay. PlacementError for
/// an op that reads a unit's buffer.
Tape without_sharding(const Tape& tape);

}  // namespace sheaf
