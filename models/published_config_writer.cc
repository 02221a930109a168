// The config.json that sheaf export writes, and whether it can describe a model.
#include <algorithm>
#include <cmath>

#include "sheaf/models/attention_window.h"
#include "sheaf/models/model_fields.h"
#include "sheaf/models/number_words.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_layers.h"

namespace sheaf::models {

namespace {

// Whether config.json contains this key for such a model: not if it affects only training, or is a choice of the run.
bool is_published(std::string_view key, const ModelConfig& m) {
  for (const std::string_view own : {"context", "dropout", "capacity_factor", "capacity_groups", "expert_balance_rate", "aux_loss", "router_z_loss",
                                     "mtp_layers", "mtp_loss", "lora_rank", "lora_alpha", "lora_layers", "quantize", "end_of_text",
                                     "rope_scaling.mscale", "rope_scaling.attention_factor", "rope_scaling.short_factor", "rope_scaling.long_factor"})
    if (key == own) return false;
  for (const std::string_view gpt : {"type", "layers", "heads", "kv_heads", "width", "head_dim", "mlp_width", "tie_embeddings", "norm_eps", "window",
                                     "attn_logit_softcapping", "final_logit_softcapping"})
    if (key == gpt) return key != "mlp_width" || !m.experts || m.dense_layers;
  if (key == "bias") return m.type == "gpt2";
  if (key == "full_attention_every") return m.window || m.linear_key_heads;
  if (m.type == "gpt2") return false;
  if (key == "expert_gate_alpha") return m.experts && m.expert_gate_limit > 0;
  if (key.starts_with("expert_") || key.starts_with("experts_") || key.starts_with("shared_") || key == "normalize_experts" || key == "dense_layers")
    return m.experts;
  if (key.starts_with("linear_") && key != "linear_key_heads") return m.linear_key_heads;
  if (key == "window_rope_theta") return m.window;
  return key != "rope_scaling.mscale_all_dim" || m.kv_lora_rank;
}

}  // namespace

void check_published_shape(const ModelConfig& model, const ModelConfig& published, const std::string& file) {
  const ModelConfig m = resolved(model);
  const auto same = [&](const char* key, const auto& ours, const auto& theirs) {
    if (!(ours == theirs)) fail<ConfigError>("[weights] model.", key, " is ", ours, ", but ", theirs, " in ", file);
  };
  for_each_model_field([&](const char* key, const auto& ours, const auto& theirs) {
    if (is_published(key, m)) same(key, ours, theirs);
  }, m, published);
  same("vocab", m.vocab, published.vocab);
  if (m.type == "llama") {
    const RotaryScaling ours = rotary_scaling(m.rope_scaling), theirs = rotary_scaling(published.rope_scaling);
    const auto list = [](const std::vector<double>* numbers) { return numbers ? text_of_numbers(*numbers) : ""; };  // however they are written
    same("rope_scaling.attention_factor", ours.amplitude, theirs.amplitude);
    same("rope_scaling.short_factor", list(ours.short_factors), list(theirs.short_factors));
    same("rope_scaling.long_factor", list(ours.long_factors), list(theirs.long_factors));
  }
  if (m.context > published.context)
    fail<ConfigError>("[weights] model.context is ", m.context, ", more than the ", published.context, " of ", file);
}

namespace {

Json::Array numbers_in(const std::string& option) {
  const std::vector<double> numbers = numbers_of("model.rope_scaling", option);
  return {numbers.begin(), numbers.end()};
}

// With the three keys of Phi-3's files, which version 4 of transformers requires of these, if the others follow from the context.
Json published_longrope(const ModelConfig& m, const std::string& type) {
  const RopeScalingConfig& s = m.rope_scaling;
  Json json;
  json.set(type == "phi3" ? "type" : "rope_type", s.rope_type).set("short_factor", numbers_in(s.short_factor)).set("long_factor", numbers_in(s.long_factor));
  if (type == "phi3" && s.attention_factor == 0 && s.factor == longrope_factor(m.context, s.original_max_position_embeddings)) return json;
  json.set("original_max_position_embeddings", s.original_max_position_embeddings)
      .set("factor", s.factor)
      .set("attention_factor", rotary_scaling(s).amplitude);
  return json;
}

Json published_rope_scaling(const ModelConfig& m, const std::string& type) {
  const RopeScalingConfig& s = m.rope_scaling;
  if (s.rope_type == "default") return {};
  if (s.rope_type == "longrope") return published_longrope(m, type);
  Json json;
  json.set("rope_type", s.rope_type).set("factor", s.factor);
  if (s.rope_type == "llama3")
    json.set("low_freq_factor", s.low_freq_factor)
        .set("high_freq_factor", s.high_freq_factor)
        .set("original_max_position_embeddings", s.original_max_position_embeddings);
  if (s.rope_type != "yarn") return json;
  json.set("original_max_position_embeddings", s.original_max_position_embeddings)
      .set("beta_slow", s.beta_slow)
      .set("beta_fast", s.beta_fast)
      .set("truncate", s.truncate);
  if (s.attention_factor != 0) json.set("attention_factor", s.attention_factor);
  if (s.mscale != 0) json.set("mscale", s.mscale);
  if (s.mscale_all_dim != 0) json.set("mscale_all_dim", s.mscale_all_dim);
  return json;
}

// Hugging Face's model_type of this shape, and its class.
struct Architecture {
  std::string type, name;
};

bool has_deepseek_experts(const ModelConfig& m) {
  return m.experts != 0 && (m.expert_affinity == "sigmoid" || m.expert_bias || m.expert_scale != 1 || m.routing_groups > 1 ||
                            m.shared_experts > 0 || m.dense_layers > 0);
}

Architecture deepseek(const ModelConfig& m) {
  check<ConfigError>(m.window == 0, "[weights] model.window ", m.window, ": no published architecture has that with latent attention");
  if (m.experts == 0 || (m.expert_affinity == "sigmoid" && m.expert_bias && m.shared_experts > 0))
    return {"deepseek_v3", "DeepseekV3ForCausalLM"};
  if (m.expert_affinity == "softmax" && !m.expert_bias && !m.normalize_experts && m.routing_groups == 1 && m.shared_experts > 0)
    return {"deepseek_v2", "DeepseekV2ForCausalLM"};
  fail<ConfigError>("[weights] with latent attention mixtures are published with sigmoid, model.expert_bias and shared experts "
                    "(deepseek_v3), or with softmax and shared experts, and without model.normalize_experts, .expert_bias and "
                    ".routing_groups (deepseek_v2): this model cannot be written as one");
}

bool has_softcaps(const ModelConfig& m) { return m.attn_logit_softcapping != 0 || m.final_logit_softcapping != 0; }

bool has_any_of_gemma(const ModelConfig& m) {
  return m.gelu_gate || m.post_norms || m.scale_embedding || m.query_pre_attn_scalar || (m.window && m.window_rope_theta != 0) || has_softcaps(m);
}

Architecture gemma(const ModelConfig& m) {
  const bool base = m.gelu_gate && m.scale_embedding && !m.qkv_bias && !m.rotary_dim && !m.experts && !m.kv_lora_rank;
  if (base && m.post_norms && !m.qk_norm && m.window_rope_theta == 0) return {"gemma2", "Gemma2ForCausalLM"};
  if (base && !has_softcaps(m) && m.post_norms && m.qk_norm && (!m.window || m.window_rope_theta != 0)) return {"gemma3_text", "Gemma3ForCausalLM"};
  if (base && !has_softcaps(m) && !m.post_norms && !m.qk_norm && !m.window && !m.query_pre_attn_scalar) return {"gemma", "GemmaForCausalLM"};
  fail<ConfigError>(
      "[weights] model.gelu_gate, .post_norms, .scale_embedding, .query_pre_attn_scalar and .window_rope_theta are published with "
      "the first and the third alone (gemma), with model.qk_norm all together (gemma3_text), or all but the last with "
      "model.attn_logit_softcapping and .final_logit_softcapping (gemma2), without mixtures, model.qkv_bias and .rotary_dim: this model "
      "cannot be written as one");
}

// OLMo 2, OLMo 3, whose blocks with a window have unscaled rotary frequencies, or OLMoE.
Architecture olmo(const ModelConfig& m) {
  const bool base = m.qk_norm_all_heads && !has_softcaps(m) && !m.gelu_gate && !m.scale_embedding && !m.query_pre_attn_scalar && !m.qkv_bias &&
                    !m.out_bias && !m.rotary_dim && !m.kv_lora_rank && !m.nope_every && !m.attention_sinks && !m.attention_gate &&
                    !m.linear_key_heads && !has_deepseek_experts(m);
  if (base && !m.pre_norms && m.post_norms && !m.experts) {
    if (!m.window) return {"olmo2", "Olmo2ForCausalLM"};
    if (m.window_rope_theta != 0 || m.rope_scaling.rope_type == "default") return {"olmo3", "Olmo3ForCausalLM"};
  }
  if (base && m.pre_norms && !m.post_norms && m.experts && !m.expert_linear_bias && m.expert_gate_limit == 0 && !m.window &&
      m.head_dim * m.heads == m.width)
    return {"olmoe", "OlmoeForCausalLM"};
  fail<ConfigError>(
      "[weights] model.qk_norm_all_heads is published with model.post_norms in place of .pre_norms and without mixtures (olmo2; with a "
      "model.window, whose blocks have model.window_rope_theta, olmo3), or with mixtures, Llama's norms and heads that are together as wide as the "
      "model (olmoe), and nothing that other models have in addition: this model cannot be written as one");
}

bool has_any_of_qwen3_next(const ModelConfig& m) { return m.linear_key_heads || m.attention_gate || (m.experts && m.shared_expert_gate); }

bool has_any_of_gpt_oss(const ModelConfig& m) {
  return m.out_bias || m.attention_sinks || (m.experts && (m.expert_linear_bias || m.expert_gate_limit > 0));
}

Architecture gpt_oss(const ModelConfig& m) {
  if (m.out_bias && m.attention_sinks && m.experts && m.expert_linear_bias && m.expert_gate_limit > 0 && m.qkv_bias && m.normalize_experts &&
      !m.qk_norm && !m.rotary_dim && !m.kv_lora_rank && !has_deepseek_experts(m) && !has_any_of_gemma(m))
    return {"gpt_oss", "GptOssForCausalLM"};
  fail<ConfigError>("[weights] model.out_bias, .attention_sinks, .expert_linear_bias and .expert_gate_limit are published all together, with "
                    "model.qkv_bias and .normalize_experts, and without norms of queries, model.rotary_dim, latent attention and what is DeepSeek's "
                    "or Gemma's (gpt_oss): this model cannot be written as one");
}

Architecture smollm3(const ModelConfig& m) {
  if (!m.qkv_bias && !m.qk_norm && !m.rotary_dim && !m.experts && !m.kv_lora_rank && !m.window && !has_any_of_gemma(m) && !has_any_of_gpt_oss(m) &&
      !has_any_of_qwen3_next(m))
    return {"smollm3", "SmolLM3ForCausalLM"};
  fail<ConfigError>("[weights] model.nope_every is published with Llama's blocks alone (smollm3): this model cannot be written as one");
}

// Qwen3-Next, or Qwen3.5, dense or with mixtures. The two with mixtures differ only in their files: the result is that of `like`.
Architecture qwen3_next(const ModelConfig& m, const std::string& like) {
  const bool shared = m.experts && m.shared_experts && m.shared_expert_gate, window = m.window != 0;
  const bool deepseeks = m.dense_layers || m.expert_affinity != "softmax" || m.expert_bias || m.expert_scale != 1 || m.routing_groups != 1;
  if (m.linear_key_heads && m.attention_gate && m.qk_norm && (m.experts == 0 || (shared && !deepseeks)) && !m.qkv_bias && !window &&
      !m.kv_lora_rank && !has_any_of_gemma(m) && !has_any_of_gpt_oss(m)) {
    if (m.experts == 0) return {"qwen3_5_text", "Qwen3_5ForCausalLM"};
    if (like == "qwen3_5_moe_text" && m.normalize_experts) return {like, "Qwen3_5MoeForCausalLM"};
    return {"qwen3_next", "Qwen3NextForCausalLM"};
  }
  fail<ConfigError>("[weights] model.linear_key_heads, .attention_gate and .shared_expert_gate are published together, with model.qk_norm, the "
                    "last with mixtures in all layers (qwen3_next), or without mixtures (qwen3_5_text), and without model.qkv_bias, .window, "
                    "latent attention and what is DeepSeek's with shared experts, Gemma's or gpt-oss's: this model cannot be written as one");
}

// GLM-4.5's and dots.llm1's mixtures are DeepSeek-V3's. dots.llm1's attention is Qwen3's; GLM-4.5's rotates a part of each head, may
// have biases, or no norms, and its files may have MTP layers.
bool is_dots1(const ModelConfig& m) { return m.qk_norm && !m.qkv_bias && !m.rotary_dim; }
Architecture dots1_or_glm(const ModelConfig& m) {
  const bool experts = m.expert_affinity == "sigmoid" && m.expert_bias && m.shared_experts > 0;
  if (experts && is_dots1(m)) return {"dots1", "Dots1ForCausalLM"};
  if (experts && !m.window) return {"glm4_moe", "Glm4MoeForCausalLM"};
  fail<ConfigError>("[weights] mixtures with any of model.expert_affinity sigmoid, .expert_bias, .expert_scale, .routing_groups, "
                    ".shared_experts and .dense_layers are published with sigmoid, model.expert_bias and shared experts, and, with a "
                    "model.window, with model.qk_norm and without model.qkv_bias and .rotary_dim (dots1, glm4_moe; or with "
                    "model.kv_lora_rank): this model cannot be written as one");
}

}  // namespace

bool publishes_mtp(const ModelConfig& m) {
  return m.experts && m.expert_affinity == "sigmoid" && (m.kv_lora_rank || (m.expert_bias && m.shared_experts && !is_dots1(m)));
}

namespace {

bool is_phi3(const ModelConfig& m) {
  const bool all_or_none = m.window == 0 || m.full_attention_every == 0;
  return m.type == "llama" && m.experts == 0 && !m.qk_norm && !m.qkv_bias && all_or_none && m.head_dim * m.heads == m.width &&
         (m.rope_scaling.rope_type == "default" || m.rope_scaling.rope_type == "longrope");
}

// ConfigError for a model of no published architecture.
Architecture architecture_of(const ModelConfig& m, const std::string& like) {
  if (m.qk_norm_all_heads || !m.pre_norms) return olmo(m);
  if (m.nope_every) return smollm3(m);
  if (has_any_of_qwen3_next(m)) return qwen3_next(m, like);
  if (has_any_of_gpt_oss(m)) return gpt_oss(m);
  if (has_any_of_gemma(m)) return gemma(m);
  if (m.kv_lora_rank) return deepseek(m);
  if (has_deepseek_experts(m)) return dots1_or_glm(m);
  if ((like == "phi3" || m.rotary_dim) && is_phi3(m)) return {"phi3", "Phi3ForCausalLM"};
  if (m.rotary_dim)
    fail<ConfigError>("[weights] model.rotary_dim ", m.rotary_dim, ": published with mixtures as DeepSeek-V3's (glm4_moe), with "
                      "model.linear_key_heads (qwen3_next, qwen3_5_text), or with Llama's blocks, whose heads are together as wide as the model, "
                      "and positions that are not scaled or longrope (phi3): this model cannot be written as one");
  if (m.qk_norm && m.qkv_bias)
    fail<ConfigError>("[weights] model.qk_norm with model.qkv_bias: no published architecture has both but with mixtures as DeepSeek-V3's");
  const bool mixtral = m.experts != 0 && !m.qk_norm;
  if (mixtral && (m.qkv_bias || !m.normalize_experts))
    fail<ConfigError>("[weights] Hugging Face's Mixtral has model.normalize_experts, and neither model.qkv_bias nor model.qk_norm: "
                      "this model cannot be written as one");
  const bool by_layer = m.experts == 0 && (m.qkv_bias || m.qk_norm);
  if (m.window && (m.type == "gpt2" || (m.full_attention_every && !by_layer)))
    fail<ConfigError>("[weights] model.window ", m.window,
                      m.full_attention_every ? str(" with model.full_attention_every ", m.full_attention_every) : "",
                      ": no published architecture has that with the rest of this model");
  if (m.type == "gpt2") return {"gpt2", "GPT2LMHeadModel"};
  if (mixtral) return {"mixtral", "MixtralForCausalLM"};
  if (m.experts != 0) return {"qwen3_moe", "Qwen3MoeForCausalLM"};
  if (m.qk_norm) return {"qwen3", "Qwen3ForCausalLM"};
  if (m.qkv_bias) return {"qwen2", "Qwen2ForCausalLM"};
  if (m.window) return {"mistral", "MistralForCausalLM"};
  return {"llama", "LlamaForCausalLM"};
}

void write_gpt2(const ModelConfig& m, Json& json) {
  json.set("n_layer", m.layers)
      .set("n_head", m.heads)
      .set("n_embd", m.width)
      .set("n_inner", m.mlp_width)
      .set("n_positions", m.context)
      .set("activation_function", "gelu_new")
      .set("layer_norm_epsilon", m.norm_eps)
      .set("embd_pdrop", m.dropout)
      .set("resid_pdrop", m.dropout)
      .set("attn_pdrop", 0.0);
}

// For DeepSeek, dots.llm1 and GLM-4.5; a model without experts has only dense layers.
void write_deepseek_experts(const ModelConfig& m, const std::string& type, Json& json) {
  json.set("moe_intermediate_size", m.experts ? m.expert_hidden : m.mlp_width)
      .set("n_routed_experts", std::max<int64_t>(1, m.experts))
      .set("n_shared_experts", std::max<int64_t>(1, m.shared_experts))
      .set("num_experts_per_tok", m.experts ? m.experts_per_token : 1)
      .set("norm_topk_prob", m.normalize_experts)
      .set("routed_scaling_factor", m.expert_scale)
      .set("n_group", m.routing_groups)
      .set("topk_group", m.routing_groups_per_token)
      .set("first_k_dense_replace", m.experts ? m.dense_layers : m.layers)
      .set("attention_bias", m.qkv_bias);
  if (type == "deepseek_v3" || type == "glm4_moe") json.set("num_nextn_predict_layers", publishes_mtp(m) ? m.mtp_layers : 0);
  if (type == "deepseek_v2") json.set("scoring_func", "softmax").set("topk_method", "greedy");
}

void write_latents(const ModelConfig& m, Json& json) {
  json.set("kv_lora_rank", m.kv_lora_rank)
      .set("q_lora_rank", m.q_lora_rank ? Json(m.q_lora_rank) : Json())
      .set("qk_nope_head_dim", m.qk_nope_head_dim)
      .set("qk_rope_head_dim", m.qk_rope_head_dim)
      .set("v_head_dim", m.v_head_dim)
      .set("rope_interleave", true)
      .set("mlp_bias", false);
}

void write_windows(const ModelConfig& m, const std::string& type, Json& json) {
  const bool dots1 = type == "dots1", qwen = type.starts_with("qwen");
  const Json window = m.window ? Json(m.window) : Json();
  if (qwen) json.set("use_sliding_window", m.window != 0);
  if (qwen && m.window) json.set("sliding_window", window).set("max_window_layers", 0);
  const bool gemma2 = type == "gemma2", gemma3 = type == "gemma3_text", gpt_oss = type == "gpt_oss", olmo3 = type == "olmo3";
  if (gemma2 || gemma3 || gpt_oss || olmo3 || (m.window && (dots1 || type == "qwen2" || type == "qwen3"))) {
    Json::Array types;
    for (int64_t i = 0; i < m.layers; ++i)
      types.push_back(window_of_block(i, m.window, m.full_attention_every) ? "sliding_attention" : "full_attention");
    json.set("layer_types", types);
  }
  if (type == "mixtral" || type == "mistral" || type == "phi3" || dots1 || olmo3) json.set("sliding_window", window);
  if (dots1) json.set("max_window_layers", 0);
  if (gemma2) json.set("sliding_window", m.window ? m.window : m.context);  // required by transformers even if no layer has a window
  if (gpt_oss) json.set("sliding_window", m.window ? m.window : 128);       // required by transformers even if no layer has a window
  if (gemma3 && m.window)
    json.set("sliding_window", window)
        .set("sliding_window_pattern", m.full_attention_every ? m.full_attention_every : m.layers + 1)  // for readers that know no layer_types
        .set("rope_local_base_freq", m.window_rope_theta);
}

// The rotated part of a head. When it is read, its product with the width is truncated to an integer.
double rotated_part(const ModelConfig& m) {
  const auto width = static_cast<double>(m.head_dim), rotated = m.rotary_dim ? static_cast<double>(m.rotary_dim) : width;
  const double part = rotated / width;
  return part * width < rotated ? std::nextafter(part, 2.0) : part;
}

// Qwen3-Next's and Qwen3.5's attention, of both kinds.
void write_linear_attention(const ModelConfig& m, Json& json) {
  Json::Array types;
  for (int64_t i = 0; i < m.layers; ++i) types.push_back(is_linear(i, m.full_attention_every) ? "linear_attention" : "full_attention");
  json.set("layer_types", types)
      .set("linear_num_key_heads", m.linear_key_heads)
      .set("linear_num_value_heads", m.linear_value_heads)
      .set("linear_key_head_dim", m.linear_key_head_dim)
      .set("linear_value_head_dim", m.linear_value_head_dim)
      .set("linear_conv_kernel_dim", m.linear_conv_kernel)
      .set("partial_rotary_factor", rotated_part(m))
      .set("attention_bias", false);
}

void write_llama(const ModelConfig& m, const std::string& type, Json& json) {
  const bool deepseek = type.starts_with("deepseek");
  json.set("num_hidden_layers", m.layers)
      .set("num_attention_heads", m.heads)
      .set("num_key_value_heads", m.kv_heads)
      .set("hidden_size", m.width)
      .set("head_dim", deepseek ? m.qk_rope_head_dim : m.head_dim)  // DeepSeek's is that of the rotated part
      .set("intermediate_size", type == "mixtral" || type == "gpt_oss" || type == "olmoe" ? m.expert_hidden : m.mlp_width)
      .set("max_position_embeddings", m.context)
      .set("rms_norm_eps", m.norm_eps)
      .set("rope_theta", m.rope_theta)
      .set("rope_scaling", published_rope_scaling(m, type));
  const bool next = type == "qwen3_next", later = type == "qwen3_5_moe_text", olmoe = type == "olmoe";
  const bool qwen = type == "qwen3_moe" || next || later;
  if (qwen) json.set("moe_intermediate_size", m.expert_hidden);
  if (qwen || olmoe)
    json.set("num_experts", m.experts)
        .set("num_experts_per_tok", m.experts_per_token)
        .set("router_aux_loss_coef", m.aux_loss);
  if (type == "qwen3_moe" || next || olmoe) json.set("norm_topk_prob", m.normalize_experts);
  if (type == "qwen3_moe" || next) json.set("decoder_sparse_step", 1).set("mlp_only_layers", Json::Array{});
  if (next || later) json.set("shared_expert_intermediate_size", m.shared_experts * m.expert_hidden);
  if (m.linear_key_heads) write_linear_attention(m, json);
  if (type == "glm4_moe") json.set("partial_rotary_factor", rotated_part(m)).set("use_qk_norm", m.qk_norm);
  if (type == "mixtral" || type == "gpt_oss")
    json.set("num_local_experts", m.experts)
        .set("num_experts_per_tok", m.experts_per_token)
        .set("router_aux_loss_coef", m.aux_loss);
  if (type == "dots1" || type == "glm4_moe" || deepseek) write_deepseek_experts(m, type, json);
  if (deepseek) write_latents(m, json);
  write_windows(m, type, json);
  if (type.starts_with("gemma")) json.set("hidden_activation", "gelu_pytorch_tanh").set("attention_bias", false);
  else json.set("hidden_act", "silu");
  if (type == "gemma2") {
    const auto cap = [](double value) { return value != 0 ? Json(value) : Json(); };
    json.set("attn_logit_softcapping", cap(m.attn_logit_softcapping)).set("final_logit_softcapping", cap(m.final_logit_softcapping));
  }
  if (type == "gemma2" || type == "gemma3_text") json.set("query_pre_attn_scalar", m.query_pre_attn_scalar ? m.query_pre_attn_scalar : m.head_dim);
  if (type == "llama" || type == "smollm3") json.set("attention_bias", false).set("mlp_bias", false);
  if (type.starts_with("olmo")) json.set("attention_bias", false);
  const bool longrope = m.rope_scaling.rope_type == "longrope";
  if (longrope || type == "phi3")
    json.set("original_max_position_embeddings", longrope ? m.rope_scaling.original_max_position_embeddings : m.context);
  if (type == "phi3") json.set("resid_pdrop", m.dropout).set("embd_pdrop", 0.0);
  if (type == "phi3" && m.rotary_dim) json.set("partial_rotary_factor", rotated_part(m));
  if (type == "olmo3") {
    // Since version 5 of transformers, by the kind of layer; before, layers with a window have no scaling and the same base.
    Json full = published_rope_scaling(m, type), window;
    if (m.rope_scaling.rope_type == "default") full.set("rope_type", "default");
    full.set("rope_theta", m.rope_theta);
    window.set("rope_type", "default").set("rope_theta", m.window_rope_theta != 0 ? m.window_rope_theta : m.rope_theta);
    json.set("rope_parameters", Json::Object{{"full_attention", full}, {"sliding_attention", window}});
  }
  if (type == "smollm3") {
    Json::Array rotated;
    for (int64_t i = 0; i < m.layers; ++i) rotated.push_back(static_cast<int64_t>((i + 1) % m.nope_every != 0));
    json.set("no_rope_layers", rotated).set("no_rope_layer_interval", m.nope_every).set("use_sliding_window", false);
  }
  if (type == "smollm3" || type == "phi3") json.set("pad_token_id", Json());  // otherwise their own, which a smaller vocabulary does not contain
  if (type != "gpt_oss") return;
  json.set("attention_bias", true).set("swiglu_limit", m.expert_gate_limit).set("swiglu_alpha", m.expert_gate_alpha);
  // Without it, transformers scales them.
  if (m.rope_scaling.rope_type == "default") json.set("rope_scaling", Json::Object{{"rope_type", "default"}});
}

}  // namespace

std::string published_architecture(const ModelConfig& model, const std::string& like) { return architecture_of(resolved(model), like).type; }

Json published_config(const ModelConfig& model, DType dtype, const std::string& like) {
  const ModelConfig m = resolved(model);
  const auto [type, name] = architecture_of(m, like);
  Json json;
  json.set("model_type", type)
      .set("architectures", Json::Array{name})
      .set("torch_dtype", dtype == kBF16 ? "bfloat16" : dtype == kF16 ? "float16" : "float32")
      .set("vocab_size", m.vocab)
      .set("tie_word_embeddings", m.tie_embeddings)
      .set("bos_token_id", Json())
      .set("eos_token_id", Json());
  if (type == "gpt2") write_gpt2(m, json);
  else write_llama(m, type, json);
  return json;
}

}  // namespace sheaf::models
