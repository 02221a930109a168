// A rank's part of a batch of samples: some of its rows and, if sequences are sharded, some tokens of each.
#pragma once

#include <functional>

#include "sheaf/core/tensor.h"

namespace sheaf::models {

/// Writes samples [first, first + count) of the run: inputs and targets, each [count, context].
using FillBatch = std::function<void(int64_t first, int64_t count, int32_t* inputs, int32_t* targets)>;

/// Writes this rank's block of the batch that begins with sample `first` into tokens and targets, i32 [batch, context] of one
/// type, dense on the host; in a pipeline, tokens may be on one stage and targets on another.
void fill_block(int64_t first, const FillBatch& fill, const Tensor& tokens, const Tensor& targets);

}  // namespace sheaf::models
