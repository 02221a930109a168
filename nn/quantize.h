// Frozen weights in blocks: what fine-tuning and evaluation hold of a model in 4 or 8 bits.
#pragma once

#include <functional>
#include <string>

#include "sheaf/core/block_format.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// Lets matrices that are frozen for good (add_lora(), Parameter::freeze_for_good) rest in blocks: all that `picks` says yes to, by
/// their names, but for tables (Parameter::set_table) and what is kept exact. Returns how many. Before shard() and materialize().
/// Along a tensor axis hidden units of MLPs are cut in 64s then, since blocks are not. ShapeError for rows that are no multiples of 64.
int64_t quantize(Module& model, BlockFormat format, const std::function<bool(const std::string& name)>& picks = {});

}  // namespace sheaf::nn
