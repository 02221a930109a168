#include "sheaf/models/presets.h"

#include "sheaf/models/gpt.h"
#include "sheaf/models/llama.h"

namespace sheaf::models {
namespace {

RopeScalingConfig options_of(const RotaryScaling& s) {
  RopeScalingConfig c;
  if (s == RotaryScaling{}) return c;
  c.rope_type = s.is_yarn() ? "yarn" : s.original_context == 0 ? "linear" : "llama3";
  c.factor = s.factor;
  if (s.is_yarn()) {
    c.original_max_position_embeddings = s.original_context;
    c.beta_slow = s.low_freq_factor, c.beta_fast = s.high_freq_factor;
    c.truncate = s.blend == RotaryScaling::Blend::by_whole_index;
    c.attention_factor = s.amplitude;
    return c;
  }
  if (s.original_context == 0) return c;
  c.low_freq_factor = s.low_freq_factor, c.high_freq_factor = s.high_freq_factor;
  c.original_max_position_embeddings = s.original_context;
  return c;
}

}  // namespace

ModelConfig options_of(const GptConfig& c) {
  ModelConfig m;
  m.type = "gpt2";
  m.layers = c.layers, m.heads = c.heads, m.width = c.width, m.mlp_width = c.mlp_width;
  m.context = c.context, m.vocab = c.vocab, m.bias = c.bias, m.tie_embeddings = c.tie_embeddings;
  m.dropout = c.dropout, m.norm_eps = c.norm_eps;
  m.window = c.window, m.full_attention_every = c.full_attention_every;
  return m;
}

ModelConfig options_of(const LlamaConfig& c) {
  ModelConfig m;
  m.type = "llama";
  m.layers = c.layers, m.heads = c.heads, m.kv_heads = c.kv_heads, m.width = c.width, m.mlp_width = c.mlp_width;
  m.context = c.context, m.vocab = c.vocab, m.tie_embeddings = c.tie_embeddings;
  m.head_dim = c.head_dim, m.qk_norm = c.qk_norm;
  m.window = c.window, m.full_attention_every = c.full_attention_every;
  m.qkv_bias = c.qkv_bias, m.dropout = c.dropout, m.rope_theta = c.rope_theta, m.norm_eps = c.norm_eps;
  m.rope_scaling = options_of(c.rope_scaling);
  m.experts = c.experts, m.experts_per_token = c.experts_per_token, m.expert_hidden = c.expert_hidden;
  m.capacity_factor = c.capacity_factor, m.expert_groups = c.expert_groups, m.normalize_experts = c.normalize_experts;
  m.expert_affinity = c.expert_affinity == nn::Affinity::sigmoid ? "sigmoid" : "softmax";
  m.expert_bias = c.expert_bias, m.expert_balance_rate = c.expert_balance_rate, m.expert_scale = c.expert_scale;
  m.expert_parts = c.expert_parts, m.expert_parts_per_token = c.expert_parts_per_token;
  m.shared_experts = c.shared_experts, m.dense_layers = c.dense_layers;
  m.aux_loss = c.aux_loss;
  return m;
}

const std::map<std::string, ModelConfig>& presets() {
  static const std::map<std::string, ModelConfig> table = [] {
    std::map<std::string, ModelConfig> t;
    for (const auto& [name, config] : GptConfig::published()) t.emplace(name, options_of(config));
    for (const auto& [name, config] : LlamaConfig::published()) t.emplace(name, options_of(config));
    return t;
  }();
  return table;
}

}  // namespace sheaf::models
