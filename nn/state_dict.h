// State dict: what a model or an optimizer keeps, as named local pieces, without communication. The same pieces serve
// for saving (read through the pointer) and for loading (write through it).
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/placement.h"
#include "sheaf/nn/module.h"
#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::nn {

/// The part of one tensor that this rank holds: elements [begin, end) of its row-major flat index.
struct StatePiece {
  std::string name;    ///< "blocks.3.mlp.up.weight"; of optimizer state "optimizer.m.blocks.3.mlp.up.weight"
  DType dtype = kF32;
  Shape shape;         ///< global
  Interval interval;   ///< empty where the rank holds nothing
  Device device = {};
  void* data = nullptr;  ///< on `device`
  bool owner = true;   ///< this rank saves it: of what several ranks hold whole, the first
};

/// Parameters and buffers, in visiting order, each once on every rank. Pointers stay valid while the model lives. What is
/// gathered is discarded first, so values written through the pointers are the ones that count. Not on meta.
std::vector<StatePiece> state_pieces(Module& module);
/// The optimizer's tensors. Its step count is Optimizer::steps().
std::vector<StatePiece> state_pieces(optim::Optimizer& optimizer);

}  // namespace sheaf::nn
