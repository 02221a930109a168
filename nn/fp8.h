// Training with products in FP8.
#pragma once

#include <functional>
#include <string>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// Makes linear layers and experts round the operands of their products (sheaf::Fp8): all whose widths are multiples of 16, as GPUs
/// require, and whose path `picks` accepts, except tables (Parameter::set_table: routers). Masters, gradients, activations and
/// communicated values keep their dtypes. Returns the number of layers. Before shard() and materialize(): it makes a tensor axis
/// shard hidden units of MLPs in groups of 16.
int64_t use_fp8(Module& model, Fp8 products, const std::function<bool(const std::string& path)>& picks = {});

}  // namespace sheaf::nn
