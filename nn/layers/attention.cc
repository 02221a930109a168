#include "sheaf/nn/layers/attention.h"

namespace sheaf::nn {
namespace {

int64_t checked_head_width(const AttentionConfig& c) {
  check<ConfigError>(c.heads > 0 && c.width > 0 && c.width % c.heads == 0, "[attention] width ", c.width,
                     " is not a multiple of ", c.heads, " heads");
  check<ConfigError>(c.kv_heads == 0 || (c.kv_heads > 0 && c.heads % c.kv_heads == 0), "[attention] ", c.heads,
                     " heads are not a multiple of ", c.kv_heads, " key and value heads");
  const int64_t d = c.width / c.heads;
  check<ConfigError>(c.rope_theta == 0.0 || d % 2 == 0, "[attention] rotary positions need heads of even width, not ", d);
  return d;
}

int64_t key_heads(const AttentionConfig& c) { return c.kv_heads ? c.kv_heads : c.heads; }

}  // namespace

CausalSelfAttention::CausalSelfAttention(const AttentionConfig& c)
    : heads(c.heads),
      kv_heads(key_heads(c)),
      head_width(checked_head_width(c)),
      rope_theta(c.rope_theta),
      qkv(c.width, (c.heads + 2 * key_heads(c)) * (c.width / c.heads), {.bias = c.bias, .init = c.init}),
      projection(c.width, c.width, {.bias = c.bias, .init = c.projection_init}),
      dropout(c.dropout) {}

Tensor CausalSelfAttention::forward(const Tensor& x_BTC) {
  const int64_t b = x_BTC.size(0), t = x_BTC.size(1), c = x_BTC.size(2), d = head_width;
  const std::vector<Tensor> parts = split(qkv(x_BTC), {heads * d, kv_heads * d, kv_heads * d}, -1);
  Tensor q_BTHD = reshape(parts[0], {b, t, heads, d});
  Tensor k_BTGD = reshape(parts[1], {b, t, kv_heads, d});
  const Tensor v_BTGD = reshape(parts[2], {b, t, kv_heads, d});
  if (rope_theta != 0.0) {
    q_BTHD = rotary(q_BTHD, rope_theta);
    k_BTGD = rotary(k_BTGD, rope_theta);
  }
  const Tensor y_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, {.causal = true});
  return dropout(projection(reshape(y_BTHD, {b, t, c})));
}

}  // namespace sheaf::nn
