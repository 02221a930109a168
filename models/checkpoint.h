// Between modules and the checkpoint store: a model's and an optimizer's pieces, saved and loaded at any world size.
#pragma once

#include "sheaf/models/checkpoint_store.h"
#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::models {

/// What this rank passes to save_checkpoint(): parameters, buffers and, if given, the optimizer's state.
std::vector<CheckpointPiece> checkpoint_pieces(nn::Module& module, optim::Optimizer* optimizer);

/// Fills this rank's pieces from a checkpoint, whatever the ranks and strategy that wrote it, and sets the optimizer's
/// step count. Throws CheckpointError naming the first tensor that is missing, left over, or of another shape or dtype.
void load_state(Checkpoint& checkpoint, nn::Module& module, optim::Optimizer* optimizer);

}  // namespace sheaf::models
