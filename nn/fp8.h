// Training with products in FP8.
#pragma once

#include <functional>
#include <string>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// Lets linear layers and experts round the operands of their products (sheaf::Fp8): all whose widths are multiples of 16, which
/// is what GPUs multiply, and that `picks` says yes to, by their paths; but for tables (Parameter::set_table: routers). Masters,
/// gradients, activations and what ranks send each other stay what they are. Returns how many layers. Before shard() and
/// materialize(): along a tensor axis hidden units of MLPs are cut in 16s then.
int64_t use_fp8(Module& model, Fp8 products, const std::function<bool(const std::string& path)>& picks = {});

}  // namespace sheaf::nn
