// Normalisation over the last dimension.
#pragma once

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

struct LayerNormOptions {
  bool bias = true;
  double eps = 1e-5;  ///< added to the variance
};

/// (x - mean) / sqrt(var + eps) * weight + bias over rows of `width` (Ba et al., https://arxiv.org/abs/1607.06450).
struct LayerNorm : Module {
  Parameter weight, bias;
  double eps;

  explicit LayerNorm(int64_t width, const LayerNormOptions& options = {})
      : weight({width}, Init::ones()), eps(options.eps) {
    if (options.bias) bias = Parameter({width}, Init::zeros());
  }
  Tensor forward(const Tensor& x) { return layer_norm(x, weight, bias, eps); }
  SHEAF_FIELDS(weight, bias);
};

/// x / sqrt(mean(x²) + eps) * weight over rows of `width` (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
struct RMSNorm : Module {
  Parameter weight;
  double eps;

  explicit RMSNorm(int64_t width, double eps = 1e-5) : weight({width}, Init::ones()), eps(eps) {}
  Tensor forward(const Tensor& x) { return rms_norm(x, weight, eps); }
  SHEAF_FIELDS(weight);
};

}  // namespace sheaf::nn
