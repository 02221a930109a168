// A forward that is recorded in parts, as a pipeline's stages do that have several runs of blocks.
#pragma once

#include "sheaf/nn/layers/norm.h"

namespace sheaf::models {

/// How far it has come: what a model's loss_until() needs to go on.
struct ForwardProgress {
  nn::Residual stream = {};  ///< in front of `block`; undefined before the first part
  int64_t block = 0;
  Tensor imbalance = {};     ///< of the mixtures so far (Llama)
};

}  // namespace sheaf::models
