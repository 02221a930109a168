#include "sheaf/models/model_options.h"

#include "sheaf/models/number_words.h"

namespace sheaf::models {
namespace {

// Calls f(field, option) for the fields that a model's configuration and a run's options have under the same name: one list for both
// directions.
template <class Model, class Options, class F>
void for_each_common_option(Model& c, Options& m, F&& f) {
  f(c.layers, m.layers);
  f(c.heads, m.heads);
  f(c.width, m.width);
  f(c.mlp_width, m.mlp_width);
  f(c.context, m.context);
  f(c.vocab, m.vocab);
  f(c.tie_embeddings, m.tie_embeddings);
  f(c.dropout, m.dropout);
  f(c.norm_eps, m.norm_eps);
  f(c.window, m.window);
  f(c.full_attention_every, m.full_attention_every);
  f(c.attn_logit_softcapping, m.attn_logit_softcapping);
  f(c.final_logit_softcapping, m.final_logit_softcapping);
  f(c.end_of_text, m.end_of_text);
}

template <class Model, class Options, class F>
void for_each_gpt_option(Model& c, Options& m, F&& f) {
  for_each_common_option(c, m, f);
  f(c.bias, m.bias);
}

template <class Model, class Options, class F>
void for_each_llama_option(Model& c, Options& m, F&& f) {
  for_each_common_option(c, m, f);
  f(c.kv_heads, m.kv_heads);
  f(c.head_dim, m.head_dim);
  f(c.qkv_bias, m.qkv_bias);
  f(c.out_bias, m.out_bias);
  f(c.attention_sinks, m.attention_sinks);
  f(c.attention_gate, m.attention_gate);
  f(c.rotary_dim, m.rotary_dim);
  f(c.qk_norm, m.qk_norm);
  f(c.qk_norm_all_heads, m.qk_norm_all_heads);
  f(c.gelu_gate, m.gelu_gate);
  f(c.pre_norms, m.pre_norms);
  f(c.post_norms, m.post_norms);
  f(c.scale_embedding, m.scale_embedding);
  f(c.query_pre_attn_scalar, m.query_pre_attn_scalar);
  f(c.window_rope_theta, m.window_rope_theta);
  f(c.nope_every, m.nope_every);
  f(c.rope_theta, m.rope_theta);
  f(c.kv_lora_rank, m.kv_lora_rank);
  f(c.q_lora_rank, m.q_lora_rank);
  f(c.qk_nope_head_dim, m.qk_nope_head_dim);
  f(c.qk_rope_head_dim, m.qk_rope_head_dim);
  f(c.v_head_dim, m.v_head_dim);
  f(c.mscale_all_dim, m.rope_scaling.mscale_all_dim);
  f(c.linear_key_heads, m.linear_key_heads);
  f(c.linear_value_heads, m.linear_value_heads);
  f(c.linear_key_head_dim, m.linear_key_head_dim);
  f(c.linear_value_head_dim, m.linear_value_head_dim);
  f(c.linear_conv_kernel, m.linear_conv_kernel);
  f(c.experts, m.experts);
  f(c.experts_per_token, m.experts_per_token);
  f(c.expert_hidden, m.expert_hidden);
  f(c.capacity_factor, m.capacity_factor);
  f(c.capacity_groups, m.capacity_groups);
  f(c.normalize_experts, m.normalize_experts);
  f(c.expert_bias, m.expert_bias);
  f(c.expert_balance_rate, m.expert_balance_rate);
  f(c.expert_scale, m.expert_scale);
  f(c.expert_linear_bias, m.expert_linear_bias);
  f(c.expert_gate_limit, m.expert_gate_limit);
  f(c.expert_gate_alpha, m.expert_gate_alpha);
  f(c.routing_groups, m.routing_groups);
  f(c.routing_groups_per_token, m.routing_groups_per_token);
  f(c.shared_experts, m.shared_experts);
  f(c.shared_expert_gate, m.shared_expert_gate);
  f(c.dense_layers, m.dense_layers);
  f(c.aux_loss, m.aux_loss);
  f(c.router_z_loss, m.router_z_loss);
  f(c.mtp_layers, m.mtp_layers);
  f(c.mtp_loss, m.mtp_loss);
}

constexpr auto kToOption = [](const auto& field, auto& option) { option = field; };
constexpr auto kToField = [](auto& field, const auto& option) { field = option; };

RopeScalingConfig options_of(const RotaryScaling& s) {
  RopeScalingConfig c;
  if (s == RotaryScaling{}) return c;
  c.rope_type = s.is_yarn() ? "yarn" : s.is_longrope() ? "longrope" : s.original_context == 0 ? "linear" : "llama3";
  c.factor = s.factor;
  if (s.is_yarn()) {
    c.original_max_position_embeddings = s.original_context;
    c.beta_slow = s.low_freq_factor, c.beta_fast = s.high_freq_factor;
    c.truncate = s.blend == RotaryScaling::Blend::by_whole_index;
    c.attention_factor = s.amplitude;
    return c;
  }
  if (s.is_longrope()) {
    c.original_max_position_embeddings = s.original_context;
    c.short_factor = text_of_numbers(*s.short_factors), c.long_factor = text_of_numbers(*s.long_factors);
    c.attention_factor = s.amplitude;
    return c;
  }
  if (s.original_context == 0) return c;
  c.low_freq_factor = s.low_freq_factor, c.high_freq_factor = s.high_freq_factor;
  c.original_max_position_embeddings = s.original_context;
  return c;
}

nn::Affinity affinity_of(const std::string& name) {
  check<ConfigError>(name == "softmax" || name == "sigmoid", "[model] unknown expert_affinity '", name, "'; known: softmax, sigmoid");
  return name == "sigmoid" ? nn::Affinity::sigmoid : nn::Affinity::softmax;
}

}  // namespace

ModelConfig options_of(const GptConfig& c) {
  ModelConfig m;
  m.type = "gpt2";
  for_each_gpt_option(c, m, kToOption);
  return m;
}

ModelConfig options_of(const LlamaConfig& c) {
  ModelConfig m;
  m.type = "llama";
  m.rope_scaling = options_of(c.rope_scaling);
  for_each_llama_option(c, m, kToOption);
  m.expert_affinity = c.expert_affinity == nn::Affinity::sigmoid ? "sigmoid" : "softmax";
  return m;
}

GptConfig gpt_config(const ModelConfig& m) {
  check<ConfigError>(m.experts == 0, "[model] model.experts ", m.experts, ": only model.type llama has mixtures of experts");
  check<ConfigError>(m.kv_lora_rank == 0, "[model] model.kv_lora_rank ", m.kv_lora_rank, ": only model.type llama has latent attention");
  check<ConfigError>(m.linear_key_heads == 0, "[model] model.linear_key_heads ", m.linear_key_heads,
                     ": only model.type llama has linear attention");
  check<ConfigError>(m.mtp_layers == 0, "[model] model.mtp_layers ", m.mtp_layers, ": only model.type llama predicts further tokens");
  GptConfig c;
  for_each_gpt_option(c, m, kToField);
  return c;
}

LlamaConfig llama_config(const ModelConfig& m) {
  LlamaConfig c;
  for_each_llama_option(c, m, kToField);
  c.rope_scaling = rotary_scaling(m.rope_scaling);
  c.expert_affinity = affinity_of(m.expert_affinity);
  return c;
}

}  // namespace sheaf::models
