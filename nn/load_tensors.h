// Values of any module from safetensors files whose tensors have other names or dtypes. Each rank reads the bytes of its own part.
//
//   Encoder model(config);
//   shard(model, mesh, ...);
//   materialize(model, world.device());
//   const auto loaded = nn::load_tensors(model, {"bert.safetensors"}, [](const std::string& name) -> std::optional<std::string> {
//     if (name.starts_with("head.")) return std::nullopt;  // stays as it is
//     return "bert.encoder." + name;
//   });
//   for (const std::string& name : loaded.unused) world.print("unused: ", name);
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// The files' name for the parameter or buffer of this name (Parameter::name(), Buffer::name()); absent: it stays as it is.
using TensorNames = std::function<std::optional<std::string>(const std::string& name)>;

struct LoadedTensors {
  std::vector<std::string> kept;    ///< the parameters and buffers without a tensor, in visiting order, parameters first
  std::vector<std::string> unused;  ///< the files' tensors that nothing asked for, sorted
  int64_t bytes = 0;                ///< the size of this rank's part in the files
};

/// Fills the parameters and buffers of a materialized module, or of a part of one, sharded in any way, from safetensors files. name_of is
/// asked once for each parameter and buffer; parameters that are tied are one, with one name. Frozen parameters are filled, too, and those
/// in blocks are quantized. Shapes must be equal. Floating dtypes are converted to each other, with rounding where the model's is
/// narrower; others must be equal. Without communication, and outside of any recording; optimizers are not notified.
///
/// Everything is checked before anything is written, on every rank. LifetimeError in a recording, and for what has no memory;
/// CheckpointError for a file that is missing or malformed, for a tensor that is in two files, and, naming the parameter, the tensor, the
/// file and both shapes and dtypes, for one that is in none, has another shape, or cannot be converted, as F8_E4M3. NonFiniteError for
/// values in blocks that are not finite.
LoadedTensors load_tensors(Module& model, const std::vector<std::string>& files, const TensorNames& name_of);

}  // namespace sheaf::nn
