// The position-wise parts of transformer blocks: [B, T, C] → [B, T, C].
#pragma once

#include <numeric>

#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::nn {

/// The activation of a gate.
enum class Gate : uint8_t { silu, gelu };

struct MlpConfig {
  int64_t width = 0;
  int64_t hidden = 0;  ///< 0: 4 · width
  bool bias = true;
  double dropout = 0.0;  ///< of the output
  Gate gate = Gate::silu;  ///< of gated ones
  GeluKind gelu = GeluKind::tanh;  ///< of MLP: by default GPT-2's approximation, unlike sheaf::gelu's; exact: BERT's and ViT's
  Init init = Init::normal(0.02);             ///< of the layers that read the residual stream
  Init projection_init = Init::normal(0.02);  ///< of the one that writes to it

  int64_t hidden_width() const { return hidden ? hidden : 4 * width; }
  /// A tensor axis shards the hidden units, in groups of eight if possible: products on GPUs need multiples of 16 bytes.
  LinearOptions reads() const { return {bias, init, OwnershipMap::even(0, std::gcd(hidden_width(), int64_t{8}))}; }
  LinearOptions writes() const { return {bias, projection_init, OwnershipMap::even(1, std::gcd(hidden_width(), int64_t{8}))}; }
};

/// down(gelu(up(x))), with GPT-2's tanh approximation of gelu unless MlpConfig::gelu is exact. On GPUs the approximation is part of the
/// products, the exact one an op of its own.
struct MLP : Module {
  Linear up, down;
  Dropout dropout;
  GeluKind kind;

  explicit MLP(const MlpConfig& c)
      : up(c.width, c.hidden_width(), c.reads()),
        down(c.hidden_width(), c.width, c.writes()),
        dropout(c.dropout),
        kind(c.gelu) {}
  /// Makes a tensor axis shard hidden units in groups of `units`. Before materialize().
  void cut_hidden_in(int64_t units) {
    if (!down.weight.cut()) return;
    up.set_cut(OwnershipMap::even(0, units)), down.set_cut(OwnershipMap::even(1, units));
  }
  Tensor forward(const Tensor& x_BTC) {
    const TensorRegion region(x_BTC, up.weight);
    const Tensor whole_BTC = region.enter(x_BTC, up.fp8 == Fp8::none);
    if (kind == GeluKind::exact) return dropout(down(gelu(up(whole_BTC), kind), region.output_layout()));
    return dropout(down.of_gelu(up.gelu(whole_BTC), region.output_layout()));
  }
  SHEAF_FIELDS(up, down, dropout);
};

/// down(silu(gate(x)) * up(x)), SwiGLU, or, with gelu's tanh approximation in its place, GeGLU (Shazeer,
/// https://arxiv.org/abs/2002.05202).
struct GatedMLP : Module {
  Linear gate, up, down;
  Dropout dropout;
  Gate kind;

  explicit GatedMLP(const MlpConfig& c)
      : gate(c.width, c.hidden_width(), c.reads()),
        up(c.width, c.hidden_width(), c.reads()),
        down(c.hidden_width(), c.width, c.writes()),
        dropout(c.dropout),
        kind(c.gate) {}
  /// As MLP's.
  void cut_hidden_in(int64_t units) {
    if (!down.weight.cut()) return;
    for (Linear* layer : {&gate, &up}) layer->set_cut(OwnershipMap::even(0, units));
    down.set_cut(OwnershipMap::even(1, units));
  }
  Tensor forward(const Tensor& x_BTC) {
    const TensorRegion region(x_BTC, up.weight);
    const Tensor whole_BTC = region.enter(x_BTC, gate.fp8 == Fp8::none);
    const Tensor gate_BTH = gate(whole_BTC), up_BTH = up(whole_BTC);
    return dropout(down(kind == Gate::gelu ? geglu(gate_BTH, up_BTH) : swiglu(gate_BTH, up_BTH), region.output_layout()));
  }
  SHEAF_FIELDS(gate, up, down, dropout);
};

/// f(mlp) for each MLP and GatedMLP of the model.
template <class F>
void for_each_mlp(Module& model, F&& f) {
  for (const auto& [path, module] : model.named_modules()) {
    if (auto* mlp = dynamic_cast<MLP*>(module)) f(*mlp);
    else if (auto* gated = dynamic_cast<GatedMLP*>(module)) f(*gated);
  }
}

}  // namespace sheaf::nn
