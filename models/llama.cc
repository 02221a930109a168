#include "sheaf/models/llama.h"

#include "sheaf/models/attention_window.h"
#include "sheaf/nn/layers/stages.h"

namespace sheaf::models {
namespace {

// For both kinds of attention.
template <class Config>
void set_window_and_rotary(Config& a, const LlamaConfig& c, int64_t block) {
  a.window = window_of_block(block, c.window, c.full_attention_every);
  a.rope_theta = c.rope_theta;
  a.rope_scaling = c.rope_scaling.for_context(c.context);
  if (a.window && c.window_rope_theta != 0) a.rope_theta = c.window_rope_theta, a.rope_scaling = {};
  if (c.nope_every > 0 && (block + 1) % c.nope_every == 0) a.rope_theta = 0.0, a.rope_scaling = {};
}

nn::AttentionConfig attention_config(const LlamaConfig& c, int64_t block) {
  nn::AttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.kv_heads = c.kv_heads;
  a.head_dim = c.head_dim;
  a.bias = false;
  a.qkv_bias = c.qkv_bias;
  a.out_bias = c.out_bias;
  a.gate = c.attention_gate;
  a.sinks = c.attention_sinks;
  a.qk_norm = c.qk_norm;
  a.qk_norm_all_heads = c.qk_norm_all_heads;
  a.norm_eps = c.norm_eps;
  a.rotary_dim = c.rotary_dim;
  if (c.query_pre_attn_scalar) {
    const int64_t head_dim = c.head_dim ? c.head_dim : c.width / c.heads;
    a.scale = std::sqrt(static_cast<double>(head_dim) / static_cast<double>(c.query_pre_attn_scalar));
  }
  set_window_and_rotary(a, c, block);
  a.softcap = c.attn_logit_softcapping;
  a.dropout = c.dropout;
  a.init = weight_init();
  a.projection_init = residual_init(c.layers);
  return a;
}

nn::LatentAttentionConfig latent_attention_config(const LlamaConfig& c, int64_t block) {
  const double mscale = c.mscale_all_dim == 0 ? 1.0 : RotaryScaling::yarn_amplitude(c.rope_scaling.factor, c.mscale_all_dim);
  nn::LatentAttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.q_lora_rank = c.q_lora_rank;
  a.kv_lora_rank = c.kv_lora_rank;
  a.qk_nope_head_dim = c.qk_nope_head_dim ? c.qk_nope_head_dim : c.width / c.heads;
  a.qk_rope_head_dim = c.qk_rope_head_dim ? c.qk_rope_head_dim : a.qk_nope_head_dim / 2;
  a.v_head_dim = c.v_head_dim ? c.v_head_dim : a.qk_nope_head_dim;  // norm_eps is not set: DeepSeek's latents have their own
  set_window_and_rotary(a, c, block);
  a.dropout = c.dropout;
  a.scale = mscale * mscale;
  a.init = weight_init();
  a.projection_init = residual_init(c.layers);
  return a;
}

// The width of attention's queries and keys, of either kind.
int64_t head_dim_of(const LlamaConfig& c) {
  if (!c.kv_lora_rank) return c.head_dim ? c.head_dim : c.width / c.heads;
  const nn::LatentAttentionConfig a = latent_attention_config(c, 0);
  return a.qk_nope_head_dim + a.qk_rope_head_dim;
}

nn::DeltaNetConfig delta_net_config(const LlamaConfig& c) {
  nn::DeltaNetConfig d;
  d.width = c.width;
  d.key_heads = c.linear_key_heads;
  d.value_heads = c.linear_value_heads ? c.linear_value_heads : c.linear_key_heads;
  d.key_width = c.linear_key_head_dim ? c.linear_key_head_dim : head_dim_of(c);
  d.value_width = c.linear_value_head_dim ? c.linear_value_head_dim : d.key_width;
  d.taps = c.linear_conv_kernel;
  d.norm_eps = c.norm_eps;
  d.dropout = c.dropout;
  d.init = weight_init();
  d.projection_init = residual_init(c.layers);
  return d;
}

nn::MlpConfig mlp_config(const LlamaConfig& c) {
  nn::MlpConfig m;
  m.width = c.width;
  m.hidden = c.mlp_width ? c.mlp_width : (8 * c.width / 3 + 63) / 64 * 64;
  m.bias = false;
  m.dropout = c.dropout;
  m.gate = c.gelu_gate ? nn::Gate::gelu : nn::Gate::silu;
  m.init = weight_init();
  m.projection_init = residual_init(c.layers);
  return m;
}

nn::MixtureConfig mixture_config(const LlamaConfig& c) {
  const nn::MlpConfig m = mlp_config(c);
  nn::MixtureConfig e;
  e.width = c.width;
  e.hidden = c.expert_hidden ? c.expert_hidden : m.hidden;
  e.experts = c.experts;
  e.choices = c.experts_per_token;
  e.affinity = c.expert_affinity;
  e.normalize = c.normalize_experts;
  e.scale = c.expert_scale;
  e.choice_bias = c.expert_bias;
  e.balance_rate = c.expert_balance_rate;
  e.routing_groups = c.routing_groups;
  e.routing_groups_per_token = c.routing_groups_per_token;
  e.shared_hidden = c.shared_experts * e.hidden;
  e.shared_gate = c.shared_expert_gate;
  e.linear_bias = c.expert_linear_bias;
  e.gate_limit = c.expert_gate_limit;
  e.gate_alpha = c.expert_gate_alpha;
  e.capacity_factor = c.capacity_factor;
  e.capacity_groups = c.capacity_groups;
  e.balances = c.aux_loss != 0;
  e.measures_logits = c.router_z_loss != 0;
  e.dropout = c.dropout;
  e.init = m.init;
  e.projection_init = m.projection_init;
  return e;
}

// The stream, and a layer's input from it.
NormedSum read_from(nn::Residual stream, std::optional<nn::RMSNorm>& norm) {
  if (norm) return (*norm)(std::move(stream));
  stream.join();
  return {stream.x, stream.x};
}

}  // namespace

LlamaBlock::LlamaBlock(const LlamaConfig& c, int64_t index) {
  if (is_linear_block(c, index)) linear_attention.emplace(delta_net_config(c));
  else if (c.kv_lora_rank) latent_attention.emplace(latent_attention_config(c, index));
  else attention.emplace(attention_config(c, index));
  if (c.experts && index >= c.dense_layers) moe.emplace(mixture_config(c));
  else mlp.emplace(mlp_config(c));
  if (c.pre_norms) attention_norm.emplace(c.width, c.norm_eps), mlp_norm.emplace(c.width, c.norm_eps);
  if (c.post_norms) attention_post_norm.emplace(c.width, c.norm_eps), mlp_post_norm.emplace(c.width, c.norm_eps);
}

nn::Residual LlamaBlock::forward(nn::Residual stream, nn::KeyValueCache* cache) {
  const Tensor begins_BT = stream.begins;
  NormedSum x_BTC = read_from(std::move(stream), attention_norm);
  const auto attend = [&](auto& layer) { return layer(x_BTC.normed, cache, begins_BT); };
  Tensor branch_BTC = linear_attention ? attend(*linear_attention) : latent_attention ? attend(*latent_attention) : attend(*attention);
  if (attention_post_norm) branch_BTC = (*attention_post_norm)(branch_BTC);
  x_BTC = read_from({x_BTC.sum, std::move(branch_BTC)}, mlp_norm);
  branch_BTC = moe ? (*moe)(x_BTC.normed, /*drops=*/cache == nullptr) : (*mlp)(x_BTC.normed);
  if (mlp_post_norm) branch_BTC = (*mlp_post_norm)(branch_BTC);
  return {x_BTC.sum, branch_BTC, begins_BT};
}

LlamaMtpLayer::LlamaMtpLayer(const LlamaConfig& c, int64_t index)
    : LlamaBlock(c, index),
      token_norm(c.width, c.norm_eps),
      hidden_norm(c.width, c.norm_eps),
      join(2 * c.width, c.width, {.bias = false, .init = weight_init()}),
      norm(c.width, c.norm_eps) {}

Tensor LlamaMtpLayer::forward(nn::Residual stream, const Tensor& next_BTC, nn::KeyValueCache* cache) {
  stream.x = join(concat({token_norm(next_BTC), hidden_norm(stream.x)}, -1));
  return norm(LlamaBlock::forward(std::move(stream), cache)).normed;
}

Llama::Llama(const LlamaConfig& c)
    : Decoder({.type = "llama", .layers = c.layers, .width = c.width, .vocab = c.vocab, .context = c.context,
               .end_of_text = c.end_of_text, .tied = c.tie_embeddings, .final_logit_softcapping = c.final_logit_softcapping,
               .mtp_layers = c.mtp_layers, .mtp_loss = c.mtp_loss}),
      config(c),
      embedding(token_table(c.vocab, c.width)),
      norm(c.width, c.norm_eps) {
  check<ConfigError>(c.experts == 0 || c.dense_layers < c.layers, "[llama] of ", c.layers, " blocks the first ", c.dense_layers,
                     " have no mixture: none has");
  check<ConfigError>(c.pre_norms || c.post_norms, "[llama] without pre_norms and post_norms nothing in the blocks is normalised");
  check<ConfigError>(c.experts == 0 || !c.gelu_gate, "[llama] gelu_gate: mixtures of experts are SwiGLU");
  check<ConfigError>(
      c.kv_lora_rank == 0 || ((c.kv_heads == 0 || c.kv_heads == c.heads) && !c.qk_norm && !c.qkv_bias && !c.out_bias && !c.attention_sinks &&
                              !c.attention_gate && !c.rotary_dim && !c.query_pre_attn_scalar && c.attn_logit_softcapping == 0),
      "[llama] kv_lora_rank ", c.kv_lora_rank, ": latent attention has as many key heads as heads (kv_heads 0, not ", c.kv_heads,
      "), and neither qk_norm, qkv_bias, out_bias, attention_sinks, attention_gate, rotary_dim, query_pre_attn_scalar nor attn_logit_softcapping");
  check<ConfigError>(c.linear_key_heads == 0 || c.window == 0, "[llama] linear_key_heads ", c.linear_key_heads, " with a window of ", c.window,
                     ": blocks without linear attention see all keys");
  blocks.reserve(static_cast<size_t>(c.layers));
  for (int64_t i = 0; i < c.layers; ++i) blocks.emplace_back(c, i);
  mtp_layers.reserve(static_cast<size_t>(c.mtp_layers));
  for (int64_t k = 0; k < c.mtp_layers; ++k) mtp_layers.emplace_back(c, c.layers + k);
}

void Llama::add_penalties(int64_t begin, int64_t end, Tensor& all) {
  const auto add_to_all = [&](Tensor& measured, double factor) {
    if (!measured) return;
    const Tensor penalty = nn::sum_over_stages(std::exchange(measured, {})) * factor;
    all = all ? all + penalty : penalty;
  };
  for (int64_t i = begin; i < end; ++i) {
    LlamaBlock& one = block(i);
    if (!one.moe) continue;
    add_to_all(one.moe->imbalance, config.aux_loss);
    add_to_all(one.moe->router_z, config.router_z_loss);
  }
}

Tensor Llama::with_penalty(const Tensor& loss, const Tensor& penalty, int64_t targets, const CrossEntropyOptions& options) {
  const auto count = static_cast<double>(targets);
  if (options.divisor && options.divide_by == 0) return loss + penalty * count / options.divisor;
  return loss + penalty * (options.divide_by > 0 ? count / options.divide_by : 1.0);
}

}  // namespace sheaf::models
