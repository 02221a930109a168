// Gated DeltaNet (Yang et al., https://arxiv.org/abs/2412.06464), as in Qwen3-Next: replaces attention in a block, with a state of
// fixed size instead of keys and values of all tokens.
//
//   B batch   T tokens   C width   G key heads   D their width   H value heads   E theirs   W taps   F = 2 G D + H E
#pragma once

#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::nn {

struct DeltaNetConfig {
  int64_t width = 0;
  int64_t key_heads = 0;    ///< of queries and of keys
  int64_t value_heads = 0;  ///< a multiple of key_heads: value_heads / key_heads read each
  int64_t key_width = 0;    ///< of a key head
  int64_t value_width = 0;  ///< of a value head
  int64_t taps = 4;         ///< width of the depthwise convolution before it
  double norm_eps = 1e-6;   ///< of the norm after it
  double dropout = 0.0;     ///< of the output
  Init init = Init::normal(0.02);             ///< of the input projections
  Init projection_init = Init::normal(0.02);  ///< of the output projection
};

/// [B, T, C] → [B, T, C]. Queries, keys and values are projected, each channel is convolved over its last W tokens and passed through
/// silu, and gated_delta_rule() reads them into the states of the value heads. The result is normalised, head by head, multiplied by
/// silu of a gate, and projected. For each token and head, beta is sigmoid(b), and the log decay -exp(log_decay) softplus(a +
/// decay_bias), where `rates` computes b and a. With a cache, the T tokens follow those that it has read. With `begins`
/// (document_begins), documents are kept separate; not with a cache. Ranks of a tensor axis share key heads with the value heads that
/// read them, as do those of a context axis, whatever attention does there: a state needs all tokens.
struct GatedDeltaNet : Module {
  DeltaNetConfig config;
  Linear qkv;                       ///< to F: queries of all heads, keys, values
  Linear gate;                      ///< to H·E
  Linear rates;                     ///< to 2 H: b of all value heads, then a
  Parameter taps;                   ///< [F, W]
  Parameter log_decay, decay_bias;  ///< [H], f32
  RMSNorm norm;                     ///< over E
  Linear projection;                ///< from H·E
  Dropout dropout;

  explicit GatedDeltaNet(const DeltaNetConfig& config);
  Tensor forward(const Tensor& x_BTC, KeyValueCache* cache = nullptr, const Tensor& begins_BT = {});
  SHEAF_FIELDS(qkv, gate, rates, taps, log_decay, decay_bias, norm, projection, dropout);

 private:
  DeltaRuleResult read(const Tensor& qkv_BTF, const Tensor& rates_BTR, GatedDeltaRuleOptions options) const;
  Tensor read_on(const Tensor& qkv_BTF, const Tensor& rates_BTR, KeyValueCache& cache) const;
};

}  // namespace sheaf::nn
