// State dict: the tensors of a model or an optimizer, as named local pieces, without communication. The same pieces serve for saving
// (read through the pointer) and for loading (write through it).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/core/runs.h"
#include "sheaf/nn/module.h"
#include "sheaf/nn/optim/diloco.h"

namespace sheaf::nn {

/// Elements of one tensor that this rank holds contiguously in memory. If the tensor is sharded along a dimension there may be
/// several such pieces, one after another; every tensor has at least one, possibly empty.
struct StatePiece {
  std::string name;  ///< "blocks.3.mlp.up.weight"; of optimizer state "optimizer.m.blocks.3.mlp.up.weight"
  DType dtype = kF32;
  Shape shape;  ///< global
  Runs runs;    ///< of the row-major flat index; empty if the rank holds nothing
  Device device = {};
  void* data = nullptr;  ///< on `device`
  bool owner = true;   ///< this rank saves it: if several ranks hold it whole, the first does
  std::optional<BlockFormat> blocks = std::nullopt;  ///< it is bytes of values stored in blocks (Parameter::quantize, BlockPiece)
};

/// Parameters and buffers, in visiting order, each on every rank. Pointers stay valid while the model lives. Gathered values are
/// discarded first, so that values written through the pointers take effect. Not on meta. Of a part of a model these are all of its
/// units': perhaps of parameters around it, too.
std::vector<StatePiece> state_pieces(Module& module);
/// The optimizer's tensors. Its step count is Optimizer::steps().
std::vector<StatePiece> state_pieces(optim::Optimizer& optimizer, const std::function<std::string(const Unit&)>& prefix_of = {});
/// The same for a model that islands train: under their names the parameters after the last outer step. With optimizers also
/// "optimizer.outer.momentum.<name>" and each island's own values, as a row of a tensor [islands, ...]: its parameters,
/// "optimizer.inner.<name>", and its optimizers' state.
std::vector<StatePiece> state_pieces(Module& module, const std::vector<optim::Optimizer*>& optimizers, const optim::DiLoCo& outer);

}  // namespace sheaf::nn
