// The linear layer.
#pragma once

#include <cmath>
#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

struct LinearOptions {
  bool bias = true;
  std::optional<Init> init = std::nullopt;  ///< of the weight; the default is uniform in ±1/sqrt(in), as in PyTorch
  /// How a tensor axis cuts the weight: along dimension 0, the outputs (the bias, too), or along dimension 1, the inputs.
  /// For layers inside of a TensorRegion.
  std::optional<OwnershipMap> cut = std::nullopt;
};

/// y[.., out] = x[.., in] weight[out, in]ᵀ + bias[out]. The bias starts at 0.
struct Linear : Module {
  Parameter weight, bias;

  Linear(int64_t in, int64_t out, const LinearOptions& options = {})
      : weight({out, in}, options.init.value_or(Init::uniform(1.0 / std::sqrt(static_cast<double>(in))))) {
    if (options.bias) bias = Parameter({out}, Init::zeros());
    if (!options.cut) return;
    weight.set_cut(*options.cut);
    if (options.bias && options.cut->dim() == 0) bias.set_cut(*options.cut);
  }
  Tensor forward(const Tensor& x) { return linear(x, weight, bias); }
  /// gelu (tanh form) of y, for the next layer's of_gelu().
  GeluOfLinear gelu(const Tensor& x) {
    const auto scope = enter();
    return linear_gelu(x, weight, bias);
  }
  /// y of a gelu.
  Tensor of_gelu(const GeluOfLinear& x) {
    const auto scope = enter();
    return gelu_linear(x, weight, bias);
  }
  SHEAF_FIELDS(weight, bias);
};

}  // namespace sheaf::nn
