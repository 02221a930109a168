#include "sheaf/models/published_layers.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sheaf/models/attention_window.h"
#include "sheaf/models/number_words.h"

namespace sheaf::models {
namespace {

// The rope_type: "default" if none is said. Files of Phi-3 have earlier names for "longrope".
std::string rope_type_of(const ConfigReader& r, const char* key, const Json& rope) {
  const Json* type = rope.find("rope_type") ? rope.find("rope_type") : rope.find("type");
  if (!type) return "default";
  const bool phi3 = r.text("model_type", "") == "phi3";
  if (phi3 && (*type == Json("su") || *type == Json("yarn"))) return "longrope";
  for (const char* known : {"default", "linear", "llama3", "yarn", "longrope"})
    if (*type == Json(known)) return known;
  r.refuse(key, str("Sheaf's rotary positions are of the rope_type default, linear, llama3, yarn or longrope, not ", type->dump()));
}

// How an object under `key` scales rotary positions in a model of this context. Their base, if the object has one, is written to
// `theta`, and the rotated part of a head to `part`, if a model may rotate less than all.
RopeScalingConfig read_rope(const ConfigReader& r, const char* key, const Json* rope, int64_t context, double& theta, double* part) {
  if (!rope->is_object()) r.refuse(key, "expected an object");
  const auto number = [&](const char* name) {
    try {
      return rope->at(name).as_double();
    } catch (const DataError&) {
      r.refuse(key, str(name, rope->find(name) ? " is not a number" : " is missing"));
    }
  };
  if (const Json* factor = rope->find("partial_rotary_factor"); factor && part) *part = number("partial_rotary_factor");
  else if (factor && !(*factor == Json(1.0) || *factor == Json(1))) r.refuse(key, "Sheaf rotates whole heads of this model_type");
  if (rope->find("rope_theta")) theta = number("rope_theta");
  if (!(theta >= 1)) r.refuse(key, str("rope_theta is ", theta, ": expected at least 1"));

  RopeScalingConfig s;
  s.rope_type = rope_type_of(r, key, *rope);
  if (s.rope_type == "default") return s;
  const bool longrope = s.rope_type == "longrope";
  // If transformers treats null or 0 as absent.
  const auto optional = [&](const char* name, double& value, bool zero_is_none = true) {
    const Json* given = rope->find(name);
    if (!given || given->is_null()) return;
    const double x = number(name);
    if (x == 0 && zero_is_none) return;
    if (!(x > 0)) r.refuse(key, str(name, " is ", x, ": expected a positive number"));
    value = x;
  };
  if (!longrope) s.factor = number("factor");
  if (s.rope_type == "llama3") {
    s.low_freq_factor = number("low_freq_factor"), s.high_freq_factor = number("high_freq_factor");
  } else if (s.rope_type == "yarn") {
    optional("beta_slow", s.beta_slow), optional("beta_fast", s.beta_fast);
    optional("mscale", s.mscale), optional("mscale_all_dim", s.mscale_all_dim);
    optional("attention_factor", s.attention_factor, false);
    if (const Json* truncate = rope->find("truncate")) {
      if (!(*truncate == Json(true) || *truncate == Json(false))) r.refuse(key, "truncate is neither true nor false");
      s.truncate = *truncate == Json(true);
    }
  }
  // DeepSeek's attention scales its scores by it, whatever the type.
  const Json* const all_dim = rope->find("mscale_all_dim");
  const std::string model_type = r.text("model_type", "");
  if ((model_type == "deepseek_v3" || model_type == "kimi_k2") && s.rope_type != "yarn" && all_dim && !all_dim->is_null() &&
      !(*all_dim == Json(0)) && !(*all_dim == Json(0.0)))
    r.refuse(key, "mscale_all_dim: Sheaf has it with the rope_type yarn only");
  if (longrope && !rope->find("original_max_position_embeddings")) {  // as in Phi-3's files
    s.original_max_position_embeddings = r.positive("original_max_position_embeddings");
  } else if (s.rope_type != "linear") {
    const double tokens = number("original_max_position_embeddings");
    if (!(tokens >= 1 && tokens <= ConfigReader::kLargest) || tokens != std::floor(tokens))
      r.refuse(key, "original_max_position_embeddings is no number of tokens");
    s.original_max_position_embeddings = static_cast<int64_t>(tokens);
    // transformers prefers this one.
    r.only("original_max_position_embeddings", s.original_max_position_embeddings, str(key, " says otherwise").c_str());
  }
  if (!longrope) return s;
  const auto list = [&](const char* name) {
    const Json* given = rope->find(name);
    if (!given) r.refuse(key, str(name, " is missing"));
    std::vector<double> numbers;
    try {
      for (const Json& x : given->as_array()) numbers.push_back(x.as_double());
    } catch (const DataError&) {
      r.refuse(key, str(name, " is not a list of numbers"));
    }
    return text_of_numbers(numbers);
  };
  s.short_factor = list("short_factor"), s.long_factor = list("long_factor");
  for (const char* own : {"short_mscale", "long_mscale"})
    if (rope->find(own)) r.refuse(key, str(own, ": Sheaf's longrope has one attention_factor for contexts of any length"));
  s.factor = longrope_factor(context, s.original_max_position_embeddings);
  optional("factor", s.factor, false), optional("attention_factor", s.attention_factor, false);
  return s;
}

// Writes which layers have full attention to m.full_attention_every: as listed in the file or, if it has no list, every n-th.
void read_linear_layers(const ConfigReader& r, ModelConfig& m) {
  const Json* types = r.find("layer_types");
  const char* key = types ? "layer_types" : "full_attention_interval";
  if (types) {
    if (!types->is_array() || std::ssize(types->as_array()) != m.layers) r.refuse(key, "expected an array with the type of each layer");
    const Json::Array& listed = types->as_array();
    const auto first_full = std::ranges::find(listed, Json("full_attention")) - listed.begin();
    m.full_attention_every = first_full < m.layers ? first_full + 1 : 0;
    for (int64_t i = 0; i < m.layers; ++i)
      if (!(listed[static_cast<size_t>(i)] == Json(is_linear(i, m.full_attention_every) ? "linear_attention" : "full_attention")))
        r.refuse(key, "Sheaf has linear_attention in all layers, or in all but each N-th, which have full_attention");
  } else {
    m.full_attention_every = r.positive(key, 4);
  }
  if (m.full_attention_every == 1) r.refuse(key, "no layer has linear attention");
}

}  // namespace

void read_rotary(const ConfigReader& r, ModelConfig& m, bool by_layer, double& window_theta, double* part) {
  if (const Json* given = r.find("rope_scaling")) m.rope_scaling = read_rope(r, "rope_scaling", given, m.context, m.rope_theta, part);
  const char* const key = "rope_parameters";  // since version 5 of transformers, the base and the scaling
  const Json* rope = r.find(key);
  if (!rope) return;
  const bool nested = rope->is_object() && (rope->find("full_attention") || rope->find("sliding_attention"));
  if (nested != by_layer)
    r.refuse(key, by_layer ? "expected full_attention and sliding_attention" : "all of Sheaf's layers of this model_type turn alike");
  if (nested) {
    const Json *full = rope->find("full_attention"), *sliding = rope->find("sliding_attention");
    if (!full || !sliding) r.refuse(key, "expected full_attention and sliding_attention");
    if (read_rope(r, key, sliding, m.context, window_theta, part) != RopeScalingConfig{})
      r.refuse(key, "Sheaf scales no frequencies in layers with a window");
    rope = full;
  }
  const double theta = m.rope_theta, rotated = part ? *part : 0;
  const RopeScalingConfig scaling = read_rope(r, key, rope, m.context, m.rope_theta, part);
  const bool same = scaling == m.rope_scaling && (nested || (theta == m.rope_theta && rotated == (part ? *part : 0)));
  if (r.find("rope_scaling") && !same) r.refuse(key, "rope_scaling says otherwise");  // and transformers believes that
  m.rope_scaling = scaling;
}

void check_rotary_scaling(const ConfigReader& r, const ModelConfig& m) {
  const std::string problem = rotary_scaling(m.rope_scaling).problem(rotated_pairs(m));
  if (!problem.empty()) r.refuse(r.find("rope_parameters") ? "rope_parameters" : "rope_scaling", problem);
}

void read_windows(const ConfigReader& r, int64_t window, const char* derived, const std::function<bool(int64_t)>& sliding, ModelConfig& m) {
  const Json* types = r.find("layer_types");
  const char* key = types ? "layer_types" : derived;
  std::vector<bool> slides;
  if (types) {
    if (!types->is_array() || std::ssize(types->as_array()) != m.layers) r.refuse(key, "expected an array with the type of each layer");
    for (const Json& type : types->as_array()) {
      slides.push_back(type == Json("sliding_attention"));
      if (!slides.back() && !(type == Json("full_attention"))) r.refuse(key, "Sheaf has full_attention and sliding_attention");
    }
  } else {
    for (int64_t i = 0; i < m.layers; ++i) slides.push_back(window != 0 && sliding(i));
  }
  const bool none = window == 0;
  const auto first_full = std::ranges::find(slides, false) - slides.begin();
  if (first_full == 0) window = 0;
  m.window = window;
  m.full_attention_every = window && first_full < m.layers ? first_full + 1 : 0;
  for (int64_t i = 0; i < m.layers; ++i)
    if (slides[static_cast<size_t>(i)] != (window_of_block(i, m.window, m.full_attention_every) != 0))
      r.refuse(key, none ? "no window is said" : "Sheaf's models have full attention in every N-th layer, or in none or all");
}

void read_nope(const ConfigReader& r, ModelConfig& m) {
  const char* const key = "no_rope_layers";  // 0 for those without, despite its name
  const Json* const listed = r.find(key);
  if (!listed) {
    m.nope_every = r.positive("no_rope_layer_interval", 4);
    return;
  }
  const auto is_flag = [](const Json& x) { return x == Json(int64_t{0}) || x == Json(int64_t{1}); };
  if (!listed->is_array() || std::ssize(listed->as_array()) < m.layers || !std::ranges::all_of(listed->as_array(), is_flag))
    r.refuse(key, "expected an array with 0 or 1 for each layer");
  const std::span<const Json> layers(listed->as_array().data(), static_cast<size_t>(m.layers));
  const auto first = std::ranges::find(layers, Json(int64_t{0})) - layers.begin();
  m.nope_every = first < m.layers ? first + 1 : 0;
  for (int64_t i = 0; i < m.layers; ++i)
    if ((layers[static_cast<size_t>(i)] == Json(int64_t{0})) != (m.nope_every > 0 && (i + 1) % m.nope_every == 0))
      r.refuse(key, "Sheaf's models have no rotary positions in every N-th layer, or in none");
}

void read_deepseek_experts(const ConfigReader& r, const std::string& type, ModelConfig& m) {
  const bool v2 = type == "deepseek_v2", latents = type.starts_with("deepseek") || type == "kimi_k2", v3 = latents && !v2;
  m.dense_layers = r.whole("first_k_dense_replace", 0);
  if (m.dense_layers >= m.layers) {
    if (!latents) r.refuse("first_k_dense_replace", str("of ", m.layers, " layers none has experts"));
    m.dense_layers = 0;
    return;
  }
  m.experts = r.experts("n_routed_experts");
  m.experts_per_token = r.positive("num_experts_per_tok");
  m.expert_hidden = r.positive("moe_intermediate_size");
  m.expert_scale = r.number("routed_scaling_factor", v3 ? 2.5 : 1.0);
  m.shared_experts = r.experts("n_shared_experts");
  m.normalize_experts = r.flag("norm_topk_prob", v3 || type == "glm4_moe");
  r.only("moe_layer_freq", 1, "after the first ones all of Sheaf's layers have experts");
  if (v2) {
    r.only("scoring_func", "softmax", "deepseek_v2 has softmax");
    r.only("topk_method", "greedy", "of deepseek_v2 Sheaf has greedy");
    r.only("norm_topk_prob", false, "deepseek_v2 does not");
    return;
  }
  r.only("scoring_func", "sigmoid", str(type, " has sigmoid").c_str());
  r.only("topk_method", "noaux_tc", str(type, " has noaux_tc").c_str());
  m.expert_affinity = "sigmoid";
  m.expert_bias = true;
  m.expert_balance_rate = 0;
  m.routing_groups = latents ? r.positive("n_group") : r.positive("n_group", 1);
  m.routing_groups_per_token = latents ? r.positive("topk_group") : r.positive("topk_group", 1);
}

void read_latents(const ConfigReader& r, ModelConfig& m) {
  m.kv_lora_rank = r.positive("kv_lora_rank");
  m.q_lora_rank = r.positive("q_lora_rank", 0);
  m.qk_nope_head_dim = r.positive("qk_nope_head_dim");
  m.qk_rope_head_dim = r.positive("qk_rope_head_dim");
  m.v_head_dim = r.positive("v_head_dim");
  if (m.kv_heads != m.heads) r.refuse("num_key_value_heads", str("each of the ", m.heads, " heads has keys of its own"));
  if (m.qk_rope_head_dim % 2 != 0) r.refuse("qk_rope_head_dim", "rotary positions turn pairs");
  r.only("rope_interleave", true, "in Sheaf's latent attention rotary positions turn neighbours");
  r.only("sliding_window", false, "DeepSeek's attention sees all tokens before");
}

void read_softcaps(const ConfigReader& r, ModelConfig& m) {
  const auto cap = [&](const char* key, double otherwise) {
    const double value = r.has(key) && !r.find(key) ? 0 : r.number(key, otherwise);  // null: none
    if (r.find(key) && !(value > 0)) r.refuse(key, "expected a positive number");
    return value;
  };
  m.attn_logit_softcapping = cap("attn_logit_softcapping", 50.0);
  m.final_logit_softcapping = cap("final_logit_softcapping", 30.0);
}

void read_gpt_oss(const ConfigReader& r, ModelConfig& m) {
  r.only("attention_bias", true, "gpt_oss has biases in both layers of attention");
  m.qkv_bias = m.out_bias = m.attention_sinks = m.expert_linear_bias = true;
  m.experts = r.experts(r.has("num_local_experts") ? "num_local_experts" : "num_experts");
  m.experts_per_token = r.positive(r.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token");  // OpenAI's key
  r.only("experts_per_token", m.experts_per_token, "num_experts_per_tok says otherwise");
  m.expert_gate_limit = r.number("swiglu_limit", 7.0);
  m.expert_gate_alpha = r.number("swiglu_alpha", 1.702);
  if (!(m.expert_gate_limit > 0)) r.refuse("swiglu_limit", "expected a positive number");
  if (!(m.expert_gate_alpha > 0)) r.refuse("swiglu_alpha", "expected a positive number");
  if (!r.find("rope_scaling") && !r.find("rope_parameters"))  // transformers' default
    m.rope_scaling = {.rope_type = "yarn", .factor = 32.0, .original_max_position_embeddings = 4096, .truncate = false};
}

void read_rotated_part(const ConfigReader& r, double part, ModelConfig& m) {
  const auto rotated = static_cast<int64_t>(part * static_cast<double>(m.head_dim));  // rounded as transformers does
  if (!(part > 0 && part <= 1) || rotated == 0 || rotated % 2 != 0)
    r.refuse(r.has("rope_parameters") ? "rope_parameters" : "partial_rotary_factor",
             str("rotary positions turn pairs, of all ", m.head_dim, " elements of a head or the first of them, not ", part, " of them"));
  m.rotary_dim = rotated == m.head_dim ? 0 : rotated;
}

void read_linear_attention(const ConfigReader& r, ModelConfig& m) {
  read_linear_layers(r, m);
  m.linear_key_heads = r.positive("linear_num_key_heads");
  m.linear_value_heads = r.positive("linear_num_value_heads");
  m.linear_key_head_dim = r.positive("linear_key_head_dim");
  m.linear_value_head_dim = r.positive("linear_value_head_dim");
  m.linear_conv_kernel = r.positive("linear_conv_kernel_dim");
  if (m.linear_value_heads % m.linear_key_heads != 0)
    r.refuse("linear_num_value_heads", str("expected a multiple of the ", m.linear_key_heads, " key heads"));
}

void read_mixtral_experts(const ConfigReader& r, ModelConfig& m) {
  m.experts = r.experts("num_local_experts");
  m.experts_per_token = r.positive("num_experts_per_tok");
  if (r.number("router_jitter_noise", 0.0) != 0.0) r.refuse("router_jitter_noise", "Sheaf's routers have no noise");
}

void read_olmoe_experts(const ConfigReader& r, ModelConfig& m) {
  m.experts = r.experts(r.has("num_experts") ? "num_experts" : "num_local_experts");
  m.experts_per_token = r.positive("num_experts_per_tok");
  m.normalize_experts = r.flag("norm_topk_prob", false);
}

void read_qwen_experts(const ConfigReader& r, const std::string& type, ModelConfig& m) {
  const bool next = type == "qwen3_next", later = type == "qwen3_5_moe_text";  // which has no key for what all such models do
  m.experts = r.experts(r.has("num_experts") ? "num_experts" : "num_local_experts");  // since version 5 of transformers
  m.experts_per_token = r.positive("num_experts_per_tok");
  m.expert_hidden = r.positive("moe_intermediate_size");
  m.normalize_experts = r.flag("norm_topk_prob", next || later);
  if (later) r.only("norm_topk_prob", true, "qwen3_5_moe_text has weights that add up to 1");
  if (r.positive("decoder_sparse_step", 1) != 1) r.refuse("decoder_sparse_step", "Sheaf's layers all have experts, or none");
  if (const Json* dense = r.find("mlp_only_layers"); dense && !dense->as_array().empty())
    r.refuse("mlp_only_layers", "Sheaf's layers all have experts, or none");
  if (!next && !later) return;
  m.shared_expert_gate = true;
  const int64_t shared = r.positive("shared_expert_intermediate_size");
  if (shared % m.expert_hidden != 0)
    r.refuse("shared_expert_intermediate_size", str("expected a multiple of moe_intermediate_size, ", m.expert_hidden));
  m.shared_experts = shared / m.expert_hidden;
}

}  // namespace sheaf::models
