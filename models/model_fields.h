// The fields of ModelConfig that affect values, listed once: for states of runs, and for comparisons.
#pragma once

#include <string_view>
#include <utility>

#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Calls f(key, field...) for each, with that field of every `m`; the key is without "model.". The vocabulary's size is not included,
/// as it may follow from data.
template <class F, class... Model>
void for_each_model_field(F&& f, Model&... m) {
  f("type", m.type...);
  f("layers", m.layers...);
  f("heads", m.heads...);
  f("kv_heads", m.kv_heads...);
  f("width", m.width...);
  f("kv_lora_rank", m.kv_lora_rank...);
  f("q_lora_rank", m.q_lora_rank...);
  f("qk_nope_head_dim", m.qk_nope_head_dim...);
  f("qk_rope_head_dim", m.qk_rope_head_dim...);
  f("v_head_dim", m.v_head_dim...);
  f("head_dim", m.head_dim...);
  f("linear_key_heads", m.linear_key_heads...);
  f("linear_value_heads", m.linear_value_heads...);
  f("linear_key_head_dim", m.linear_key_head_dim...);
  f("linear_value_head_dim", m.linear_value_head_dim...);
  f("linear_conv_kernel", m.linear_conv_kernel...);
  f("mlp_width", m.mlp_width...);
  f("context", m.context...);
  f("window", m.window...);
  f("full_attention_every", m.full_attention_every...);
  f("bias", m.bias...);
  f("qkv_bias", m.qkv_bias...);
  f("out_bias", m.out_bias...);
  f("attention_sinks", m.attention_sinks...);
  f("attention_gate", m.attention_gate...);
  f("rotary_dim", m.rotary_dim...);
  f("qk_norm", m.qk_norm...);
  f("qk_norm_all_heads", m.qk_norm_all_heads...);
  f("gelu_gate", m.gelu_gate...);
  f("pre_norms", m.pre_norms...);
  f("post_norms", m.post_norms...);
  f("scale_embedding", m.scale_embedding...);
  f("query_pre_attn_scalar", m.query_pre_attn_scalar...);
  f("attn_logit_softcapping", m.attn_logit_softcapping...);
  f("final_logit_softcapping", m.final_logit_softcapping...);
  f("window_rope_theta", m.window_rope_theta...);
  f("nope_every", m.nope_every...);
  f("experts", m.experts...);
  f("experts_per_token", m.experts_per_token...);
  f("expert_hidden", m.expert_hidden...);
  f("capacity_factor", m.capacity_factor...);
  f("capacity_groups", m.capacity_groups...);
  f("normalize_experts", m.normalize_experts...);
  f("expert_affinity", m.expert_affinity...);
  f("expert_bias", m.expert_bias...);
  f("expert_balance_rate", m.expert_balance_rate...);
  f("expert_scale", m.expert_scale...);
  f("expert_linear_bias", m.expert_linear_bias...);
  f("expert_gate_limit", m.expert_gate_limit...);
  f("expert_gate_alpha", m.expert_gate_alpha...);
  f("routing_groups", m.routing_groups...);
  f("routing_groups_per_token", m.routing_groups_per_token...);
  f("shared_experts", m.shared_experts...);
  f("shared_expert_gate", m.shared_expert_gate...);
  f("dense_layers", m.dense_layers...);
  f("aux_loss", m.aux_loss...);
  f("router_z_loss", m.router_z_loss...);
  f("mtp_layers", m.mtp_layers...);
  f("mtp_loss", m.mtp_loss...);
  f("tie_embeddings", m.tie_embeddings...);
  f("dropout", m.dropout...);
  f("rope_theta", m.rope_theta...);
  f("rope_scaling.rope_type", m.rope_scaling.rope_type...);
  f("rope_scaling.factor", m.rope_scaling.factor...);
  f("rope_scaling.low_freq_factor", m.rope_scaling.low_freq_factor...);
  f("rope_scaling.high_freq_factor", m.rope_scaling.high_freq_factor...);
  f("rope_scaling.original_max_position_embeddings", m.rope_scaling.original_max_position_embeddings...);
  f("rope_scaling.beta_slow", m.rope_scaling.beta_slow...);
  f("rope_scaling.beta_fast", m.rope_scaling.beta_fast...);
  f("rope_scaling.truncate", m.rope_scaling.truncate...);
  f("rope_scaling.attention_factor", m.rope_scaling.attention_factor...);
  f("rope_scaling.mscale", m.rope_scaling.mscale...);
  f("rope_scaling.mscale_all_dim", m.rope_scaling.mscale_all_dim...);
  f("rope_scaling.short_factor", m.rope_scaling.short_factor...);
  f("rope_scaling.long_factor", m.rope_scaling.long_factor...);
  f("norm_eps", m.norm_eps...);
  f("lora_rank", m.lora_rank...);
  f("lora_alpha", m.lora_alpha...);
  f("lora_layers", m.lora_layers...);
  f("quantize", m.quantize...);
  f("end_of_text", m.end_of_text...);
}

/// The key that an option had in earlier versions, whose checkpoints still have it; `key` itself if it was not renamed.
inline std::string_view earlier_name(std::string_view key) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"model.capacity_groups", "model.expert_groups"},
                                                                      {"model.routing_groups", "model.expert_parts"},
                                                                      {"model.routing_groups_per_token", "model.expert_parts_per_token"},
                                                                      {"model.linear_key_head_dim", "model.linear_key_width"},
                                                                      {"model.linear_value_head_dim", "model.linear_value_width"},
                                                                      {"model.linear_conv_kernel", "model.linear_taps"},
                                                                      {"model.rotary_dim", "model.rotary_width"}};
  for (const auto& [now, before] : kNames)
    if (now == key) return before;
  return key;
}

}  // namespace sheaf::models
