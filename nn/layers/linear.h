// The linear layer.
#pragma once

#include <cmath>
#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/layers/lora.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

struct LinearOptions {
  bool bias = true;
  std::optional<Init> init = std::nullopt;  ///< of the weight; the default is uniform in ±1/sqrt(in), as in PyTorch
  /// How a tensor axis shards the weight: along dimension 0, the outputs (the bias, too), or along dimension 1, the inputs. For
  /// layers inside of a TensorRegion.
  std::optional<OwnershipMap> cut = std::nullopt;
};

/// y[.., out] = x[.., in] weight[out, in]ᵀ + bias[out]. The bias starts at 0. The result may be sent to `output_layout` at once: see
/// apply_and_redistribute().
struct Linear : Module {
  Parameter weight, bias;
  std::optional<Lora> lora;  ///< for fine-tuning: created by add_lora()
  Fp8 fp8 = Fp8::none;       ///< which of its products round their operands; use_fp8() sets it

  Linear(int64_t in, int64_t out, const LinearOptions& options = {})
      : weight({out, in}, options.init.value_or(Init::uniform(1.0 / std::sqrt(static_cast<double>(in))))) {
    if (options.bias) bias = Parameter({out}, Init::zeros());
    if (options.cut) set_cut(*options.cut);
  }
  void take_settings(const Module& source) override { fp8 = static_cast<const Linear&>(source).fp8; }
  /// Sets LinearOptions::cut of an existing layer and of its adapter: before materialize().
  void set_cut(const OwnershipMap& cut) {
    weight.set_cut(cut);
    if (bias && cut.dim() == 0) bias.set_cut(cut);
    if (lora) (cut.dim() == 0 ? lora->b : lora->a).set_cut(cut);
  }
  Tensor forward(const Tensor& x, const OutputLayout& output_layout = {}) {
    return lora || multiplies_blocks() ? redistribute_output(adapted(product(x), x), output_layout) : product(x, output_layout);
  }
  /// gelu (tanh form) of y, for the next layer's of_gelu().
  GeluOfLinear gelu(const Tensor& x) {
    const auto scope = enter();
    if (!lora && !multiplies_blocks()) return linear_gelu(x, weight, bias, fp8);
    const Tensor y = forward(x);
    return {sheaf::gelu(y, GeluKind::tanh), y};
  }
  /// y, given the gelu of another layer.
  Tensor of_gelu(const GeluOfLinear& x, const OutputLayout& output_layout = {}) {
    const auto scope = enter();
    if (!lora && !multiplies_blocks()) return gelu_linear(x, weight, bias, fp8, output_layout);
    return redistribute_output(adapted(multiplies_blocks() ? product(x.value) : gelu_linear(x, weight, bias, fp8), x.value), output_layout);
  }
  SHEAF_FIELDS(weight, bias, lora);

 private:
  /// If nothing will be differentiated, a weight in blocks is multiplied directly: its values exist only inside of the product.
  bool multiplies_blocks() const { return weight.blocks() && !Recording::current() && fp8 == Fp8::none; }
  Tensor product(const Tensor& x, const OutputLayout& output_layout = {}) const {
    if (weight.blocks() && x && x.dtype() != weight.dtype())
      fail<DTypeError>("[linear] '", weight.name(), "' is computed with in ", weight.dtype(), ", and its input is ", x.type(), ": cast it first");
    return multiplies_blocks() ? linear_of_blocks(x, weight.in_blocks(), *weight.blocks(), bias) : linear(x, weight, bias, fp8, output_layout);
  }
  Tensor adapted(const Tensor& y, const Tensor& x) { return lora ? y + (*lora)(x) : y; }
};

}  // namespace sheaf::nn
