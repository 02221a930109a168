// The ops of Muon on a tape: steps on the elements of chosen parameters, and copies between owners' values and batches.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/nn/optim/matrix_batches.h"

namespace sheaf::optim {

struct MuonOps {
  // [Note: parts] Parameters of one kind are selected from a flat shard: the state contains only these, one after another. A table
  // has for each piece its offset in the shard and in the state, and its elements. The scalars are those of AdamW, of the momentum
  // and of the step, one after another.
  struct Parts {
    Table parts;
    int64_t nesterov = 0;
    int64_t before = 0;  ///< of Muon's step: elements before those in the state
  };
  /// gradient, momentum, segments, scalars [, clip scale [, found_inf]] → direction (0 after an overflow), and momentum in place
  static const OpDef& momentum();
  /// parameters, direction, segments, scalars [, found_inf] → parameters, in place
  static const OpDef& step();
  /// parameters, gradient, m, v, segments, scalars [, clip scale [, found_inf]] → parameters, m, v, in place
  static const OpDef& adamw();

  /// Slices of a group along a secondary axis, each padded to the largest → the same without gaps.
  struct Slices { Table sizes; };
  static const OpDef& join();

  /// See Batch::own.
  struct Own { Table own; };
  static const OpDef& stack();     ///< owners' values, for each of a batch's bundles → their matrices, or blocks of them
  static const OpDef& unstack();   ///< matrices or blocks, and the inputs of stack → these, in place

  struct Blocks { OwnershipMap cut; };
  static const OpDef& assemble();  ///< [ranks, k, room], blocks of each rank → [k, M, N]
  static const OpDef& take_apart();  ///< the reverse
};

}  // namespace sheaf::optim
