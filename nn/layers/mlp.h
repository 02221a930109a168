// The position-wise parts of transformer blocks: [B, T, C] → [B, T, C].
#pragma once

#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/linear.h"

namespace sheaf::nn {

struct MlpConfig {
  int64_t width = 0;
  int64_t hidden = 0;    ///< 0: 4 · width
  bool bias = true;
  double dropout = 0.0;  ///< of the output
  Init init = Init::normal(0.02);             ///< of the layers that read the residual stream
  Init projection_init = Init::normal(0.02);  ///< of the one that writes to it
};

/// down(gelu(up(x))), with GPT-2's tanh approximation of gelu.
struct MLP : Module {
  Linear up, down;
  Dropout dropout;

  explicit MLP(const MlpConfig& c)
      : up(c.width, c.hidden ? c.hidden : 4 * c.width, {.bias = c.bias, .init = c.init}),
        down(c.hidden ? c.hidden : 4 * c.width, c.width, {.bias = c.bias, .init = c.projection_init}),
        dropout(c.dropout) {}
  Tensor forward(const Tensor& x_BTC) { return dropout(down.of_gelu(up.gelu(x_BTC))); }
  SHEAF_FIELDS(up, down, dropout);
};

/// down(silu(gate(x)) * up(x)) (Shazeer, https://arxiv.org/abs/2002.05202).
struct SwiGluMLP : Module {
  Linear gate, up, down;
  Dropout dropout;

  explicit SwiGluMLP(const MlpConfig& c)
      : gate(c.width, c.hidden ? c.hidden : 4 * c.width, {.bias = c.bias, .init = c.init}),
        up(c.width, c.hidden ? c.hidden : 4 * c.width, {.bias = c.bias, .init = c.init}),
        down(c.hidden ? c.hidden : 4 * c.width, c.width, {.bias = c.bias, .init = c.projection_init}),
        dropout(c.dropout) {}
  Tensor forward(const Tensor& x_BTC) { return dropout(down(swiglu(gate(x_BTC), up(x_BTC)))); }
  SHEAF_FIELDS(gate, up, down, dropout);
};

}  // namespace sheaf::nn
