// A model as text.
#pragma once

#include <string>

#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// The model's modules, parameters and buffers in the order of SHEAF_FIELDS, a line each, and which modules are units: parameters that
/// are gathered together, with the type of their masters. Elements of a vector that differ in nothing are one line. Before shard(),
/// after it, and after materialize(), which knows the masters; any rank may call it alone:
///
///   Net: 3,395 parameters; masters of 4 units, 6.73 KiB on this rank
///   the root is a unit: f32[1155] Shard(flat)@data
///     blocks.0 to blocks.2: Linear, each a unit: f32[1120] Shard(flat)@data
///       weight  f32[32,32]
///       bias  f32[32]
///     head: Linear
///       weight  f32[35,32]
std::string to_text(Module& model);

}  // namespace sheaf::nn
