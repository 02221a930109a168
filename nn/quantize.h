// Frozen weights in blocks: for fine-tuning and evaluating models in 4 or 8 bits.
#pragma once

#include <functional>
#include <string>

#include "sheaf/core/block_format.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// Stores matrices that are frozen for good (add_lora(), Parameter::freeze_for_good) in blocks: all whose names `picks` accepts,
/// except tables (Parameter::set_table) and those kept exact. Returns how many. Before shard() and materialize(). A tensor axis then
/// shards hidden units of MLPs in groups of 64, as it must not split blocks. ShapeError for rows that are not multiples of 64.
int64_t quantize(Module& model, BlockFormat format, const std::function<bool(const std::string& name)>& picks = {});

}  // namespace sheaf::nn
