// Lora: the adapter that fine-tuning adds to a linear layer with a frozen weight.
#pragma once

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

struct LoraOptions {
  int64_t rank = 8;     ///< r
  double alpha = 16.0;  ///< the adapter's output is scaled by alpha / r
};

/// alpha / r · x[.., in] a[r, in]ᵀ b[out, r]ᵀ (low-rank adaptation; Hu et al., https://arxiv.org/abs/2106.09685). a starts uniform
/// in ±1/sqrt(in), b at 0, so that at first nothing is added.
struct Lora : Module {
  Parameter a, b;
  double scale;

  /// For a weight [out, in]; if a tensor axis shards that, it shards the same side here.
  Lora(const Parameter& weight, const LoraOptions& options);
  Tensor forward(const Tensor& x) { return linear(linear(x, a) * scale, b); }
  SHEAF_FIELDS(a, b);
};

}  // namespace sheaf::nn
