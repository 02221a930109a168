// Fine-tuning with low-rank adapters: most of a model is frozen, and a few small matrices are trained.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "sheaf/nn/layers/lora.h"

namespace sheaf::nn {

/// Freezes the model for good, except for adapters that it has, and gives a Lora to each linear layer whose path `picks` accepts
/// (all, if it is empty), except those whose weight is a table (Parameter::set_table), which is also used outside of the layer, as a
/// head's is. Returns how many. Before shard() and materialize(): adapters are sharded like the layers around them, in separate
/// buffers; frozen weights have neither gradients nor optimizer state, nor masters wider than their compute dtype.
int64_t add_lora(Module& model, const LoraOptions& options = {}, const std::function<bool(const std::string& path)>& picks = {});

/// Gives the layers of `target` adapters like those of the same layers of `source`, whose clone() without them it is.
void copy_lora(Module& source, Module& target);

/// Whether a parameter of this name is an adapter's: "blocks.0.attention.qkv.lora.a".
bool is_lora(std::string_view name);

}  // namespace sheaf::nn
