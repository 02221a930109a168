#include "sheaf/models/published_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "sheaf/core/file.h"
#include "sheaf/models/attention_window.h"
#include "sheaf/models/published_reader.h"

namespace sheaf::models {
namespace {

const std::string_view kOfLlamasShape[] = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "dots1", "deepseek_v2", "deepseek_v3",
                                           "gemma", "gemma3_text", "gpt_oss", "qwen3_next"};

ModelConfig read_gpt2(const ConfigReader& r) {
  if (const std::string f = r.text("activation_function", "gelu_new"); f != "gelu_new" && f != "gelu_pytorch_tanh")
    r.refuse("activation_function", "Sheaf's gpt2 has gelu_new, which is gelu_pytorch_tanh");
  r.only("scale_attn_weights", true, "Sheaf's attention always divides by the root of the head's width");
  r.only("scale_attn_by_inverse_layer_idx", false, "Sheaf's attention does not depend on the layer");
  r.only("add_cross_attention", false, "Sheaf's gpt2 has no cross-attention");
  ModelConfig m;
  m.type = "gpt2";
  m.layers = r.layers("n_layer");
  m.heads = r.positive("n_head");
  m.width = r.positive("n_embd");
  m.mlp_width = r.positive("n_inner", 0);
  m.context = r.positive("n_positions");
  m.norm_eps = r.number("layer_norm_epsilon", 1e-5);
  m.tie_embeddings = r.flag("tie_word_embeddings", true);
  m.bias = true;
  return m;
}

// Gemma's gelu under either of its keys, of which some files have the first with what they do not mean.
void check_gemmas_gate(const ConfigReader& r) {
  const char* const key = r.find("hidden_activation") ? "hidden_activation" : "hidden_act";
  if (r.text(key, "gelu_pytorch_tanh") != "gelu_pytorch_tanh" && !(key == std::string_view("hidden_act") && r.text(key, "") == "gelu"))
    r.refuse(key, "Gemma's is gelu_pytorch_tanh");
}

// How an object under `key` scales rotary positions. Their base goes to `theta`, if it is there too, and the part of a head that they turn
// to `part`, where a model may turn less than all.
RopeScalingConfig read_rope(const ConfigReader& r, const char* key, const Json* rope, double& theta, double* part) {
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

  RopeScalingConfig s;
  const Json* type = rope->find("rope_type") ? rope->find("rope_type") : rope->find("type");
  if (!type || *type == Json("default")) return s;
  if (!(*type == Json("linear") || *type == Json("llama3") || *type == Json("yarn")))
    r.refuse(key, str("Sheaf's rotary positions are of the rope_type default, linear, llama3 or yarn, not ", type->dump()));
  s.rope_type = type->as_string();
  s.factor = number("factor");
  if (s.rope_type == "llama3") {
    s.low_freq_factor = number("low_freq_factor"), s.high_freq_factor = number("high_freq_factor");
  } else if (s.rope_type == "yarn") {
    // Where transformers takes null or 0 for nothing.
    const auto optional = [&](const char* name, double& value, bool zero_is_none = true) {
      const Json* given = rope->find(name);
      if (!given || given->is_null()) return;
      const double x = number(name);
      if (x == 0 && zero_is_none) return;
      if (!(x > 0)) r.refuse(key, str(name, " is ", x, ": expected a positive number"));
      value = x;
    };
    optional("beta_slow", s.beta_slow), optional("beta_fast", s.beta_fast);
    optional("mscale", s.mscale), optional("mscale_all_dim", s.mscale_all_dim);
    optional("attention_factor", s.attention_factor, false);
    if (const Json* truncate = rope->find("truncate")) {
      if (!(*truncate == Json(true) || *truncate == Json(false))) r.refuse(key, "truncate is neither true nor false");
      s.truncate = *truncate == Json(true);
    }
  }
  if (s.rope_type != "linear") {
    const double tokens = number("original_max_position_embeddings");
    if (!(tokens >= 1 && tokens <= ConfigReader::kLargest) || tokens != std::floor(tokens))
      r.refuse(key, "original_max_position_embeddings is no number of tokens");
    s.original_max_position_embeddings = static_cast<int64_t>(tokens);
    // transformers prefers this one.
    r.only("original_max_position_embeddings", s.original_max_position_embeddings, str(key, " says otherwise").c_str());
  }
  if (const std::string problem = rotary_scaling(s).problem(); !problem.empty()) r.refuse(key, problem);
  return s;
}

// Of all layers, or, as Gemma 3 has them (by_layer), of those that see all tokens, and of those with a window, whose base goes to
// `window_theta`. `part` as above.
void read_rotary(const ConfigReader& r, ModelConfig& m, bool by_layer, double& window_theta, double* part) {
  if (const Json* given = r.find("rope_scaling")) m.rope_scaling = read_rope(r, "rope_scaling", given, m.rope_theta, part);
  const char* const key = "rope_parameters";  // since version 5 of transformers, the base and the scaling
  const Json* rope = r.find(key);
  if (!rope) return;
  const bool nested = rope->is_object() && (rope->find("full_attention") || rope->find("sliding_attention"));
  if (nested != by_layer) r.refuse(key, by_layer ? "expected full_attention and sliding_attention" : "all of Sheaf's layers of this model_type turn alike");
  if (nested) {
    const Json *full = rope->find("full_attention"), *sliding = rope->find("sliding_attention");
    if (!full || !sliding) r.refuse(key, "expected full_attention and sliding_attention");
    if (read_rope(r, key, sliding, window_theta, part) != RopeScalingConfig{})
      r.refuse(key, "Sheaf scales no frequencies in layers with a window");
    rope = full;
  }
  const RopeScalingConfig scaling = read_rope(r, key, rope, m.rope_theta, part);
  if (r.find("rope_scaling") && !(scaling == m.rope_scaling)) r.refuse(key, "rope_scaling says otherwise");
  m.rope_scaling = scaling;
}

// Which layers see `window` keys alone, as the file lists them or, if it does not, by `sliding(i)`, goes to m.window and
// m.full_attention_every; `derived` is the key that says it then.
template <class F>
void read_windows(const ConfigReader& r, int64_t window, const char* derived, F&& sliding, ModelConfig& m) {
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

// The experts of DeepSeek-V3, which are dots.llm1's, too, and those of DeepSeek-V2.
void read_deepseek_experts(const ConfigReader& r, const std::string& type, ModelConfig& m) {
  const bool dots1 = type == "dots1", v2 = type == "deepseek_v2", v3 = type == "deepseek_v3";
  m.dense_layers = r.whole("first_k_dense_replace", 0);
  if (m.dense_layers >= m.layers) {
    if (dots1) r.refuse("first_k_dense_replace", str("of ", m.layers, " layers none has experts"));
    m.dense_layers = 0;
    return;
  }
  m.experts = r.positive("n_routed_experts");
  m.experts_per_token = r.positive("num_experts_per_tok");
  m.expert_hidden = r.positive("moe_intermediate_size");
  m.expert_scale = r.number("routed_scaling_factor", v3 ? 2.5 : 1.0);
  m.shared_experts = r.positive("n_shared_experts");
  m.normalize_experts = r.flag("norm_topk_prob", v3);
  r.only("moe_layer_freq", 1, "behind the first ones all of Sheaf's layers have experts");
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
  m.expert_parts = dots1 ? r.positive("n_group", 1) : r.positive("n_group");
  m.expert_parts_per_token = dots1 ? r.positive("topk_group", 1) : r.positive("topk_group");
}

// DeepSeek's latent attention.
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

// gpt-oss's attention and experts.
void read_gpt_oss(const ConfigReader& r, ModelConfig& m) {
  r.only("attention_bias", true, "gpt_oss has biases in both layers of attention");
  m.qkv_bias = m.out_bias = m.attention_sinks = m.expert_linear_bias = true;
  m.experts = r.positive(r.has("num_local_experts") ? "num_local_experts" : "num_experts");
  m.experts_per_token = r.positive(r.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token");  // OpenAI's key
  r.only("experts_per_token", m.experts_per_token, "num_experts_per_tok says otherwise");
  m.expert_gate_limit = r.number("swiglu_limit", 7.0);
  m.expert_gate_alpha = r.number("swiglu_alpha", 1.702);
  if (!(m.expert_gate_limit > 0)) r.refuse("swiglu_limit", "expected a positive number");
  if (!(m.expert_gate_alpha > 0)) r.refuse("swiglu_alpha", "expected a positive number");
  if (!r.find("rope_scaling") && !r.find("rope_parameters"))  // what transformers has then
    m.rope_scaling = {.rope_type = "yarn", .factor = 32.0, .original_max_position_embeddings = 4096, .truncate = false};
}

// Which layers have full attention goes to m.full_attention_every: as the file lists them or, if it does not, each so many-th.
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

// Qwen3-Next's attention, of both kinds, and shared experts; `part` of each head is rotated.
void read_qwen3_next(const ConfigReader& r, double part, ModelConfig& m) {
  m.qk_norm = m.attention_gate = m.shared_expert_gate = true;
  read_linear_layers(r, m);
  m.linear_key_heads = r.positive("linear_num_key_heads");
  m.linear_value_heads = r.positive("linear_num_value_heads");
  m.linear_key_head_dim = r.positive("linear_key_head_dim");
  m.linear_value_head_dim = r.positive("linear_value_head_dim");
  m.linear_conv_kernel = r.positive("linear_conv_kernel_dim");
  if (m.linear_value_heads % m.linear_key_heads != 0)
    r.refuse("linear_num_value_heads", str("expected a multiple of the ", m.linear_key_heads, " key heads"));
  const auto rotated = static_cast<int64_t>(part * static_cast<double>(m.head_dim));  // rounded as transformers does
  if (!(part > 0 && part <= 1) || rotated == 0 || rotated % 2 != 0)
    r.refuse(r.has("rope_parameters") ? "rope_parameters" : "partial_rotary_factor",
             str("rotary positions turn pairs, of all ", m.head_dim, " elements of a head or the first of them, not ", part, " of them"));
  m.rotary_dim = rotated == m.head_dim ? 0 : rotated;
  const int64_t shared = r.positive("shared_expert_intermediate_size"), hidden = r.positive("moe_intermediate_size");
  if (shared % hidden != 0) r.refuse("shared_expert_intermediate_size", str("expected a multiple of moe_intermediate_size, ", hidden));
  m.shared_experts = shared / hidden;
}

// Those of one shape: Llama's, Mistral's, Mixtral's, Qwen2's, whose queries, keys and values have biases, Qwen3's, whose
// queries and keys have norms instead, with mixtures of experts, too, dots.llm1's, with mixtures of another kind, DeepSeek's, which
// have those and attention of another kind, Gemma's, whose gates are gelus, and which normalise more, gpt-oss's, with biases
// wherever there are matrices, and Qwen3-Next's, with linear attention.
ModelConfig read_llama(const ConfigReader& r, const std::string& type) {
  const bool llama = type == "llama", mixtral = type == "mixtral", qwen3_moe = type == "qwen3_moe", next = type == "qwen3_next";
  const bool dots1 = type == "dots1", deepseek = type == "deepseek_v2" || type == "deepseek_v3";
  const bool gemma = type.starts_with("gemma"), gemma3 = type == "gemma3_text", gpt_oss = type == "gpt_oss";
  const bool qwen = type == "qwen2" || type == "qwen3" || qwen3_moe || next;
  if (gemma) check_gemmas_gate(r);
  else if (r.text("hidden_act", "silu") != "silu") r.refuse("hidden_act", "Sheaf's llama has silu");
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) r.only(key, Json(), "Sheaf's logits are not capped");
  if (!gpt_oss) r.only("attention_bias", false, "Sheaf's llama has no biases in both layers of attention");
  r.only("mlp_bias", false, "Sheaf's llama has no biases in MLPs");
  r.only("use_bidirectional_attention", false, "Sheaf's attention sees the tokens before");
  r.only("rope_interleaved", false, "Sheaf's rotary positions turn the halves of a head");
  if (!qwen) r.only("use_sliding_window", false, "that is a key of Qwen's");
  if (next) r.only("use_sliding_window", false, "full attention of qwen3_next sees all tokens before");
  if (llama || type == "gemma") r.only("sliding_window", false, str(llama ? "Llama" : "Gemma", "'s attention sees all tokens before").c_str());
  double part = r.number("partial_rotary_factor", next ? 0.25 : 1.0);
  if (!next && part != 1.0) r.refuse("partial_rotary_factor", "Sheaf rotates whole heads of this model_type");
  ModelConfig m;
  m.type = "llama";
  m.layers = r.layers("num_hidden_layers");
  m.heads = r.positive("num_attention_heads");
  m.kv_heads = llama || deepseek ? r.positive("num_key_value_heads", m.heads) : r.positive("num_key_value_heads");
  m.width = r.positive("hidden_size");
  m.mlp_width = r.positive("intermediate_size");
  m.context = r.positive("max_position_embeddings");
  m.norm_eps = r.number("rms_norm_eps", gpt_oss ? 1e-5 : 1e-6);
  m.rope_theta = r.number("rope_theta", mixtral || gemma3 ? 1e6 : gpt_oss ? 150000.0 : 10000.0);
  double window_theta = r.number("rope_local_base_freq", 10000.0);
  read_rotary(r, m, gemma3, window_theta, next ? &part : nullptr);
  m.tie_embeddings = r.flag("tie_word_embeddings", gemma);
  m.bias = false;
  m.qkv_bias = type == "qwen2";
  m.qk_norm = type == "qwen3" || qwen3_moe || dots1 || gemma3;
  m.gelu_gate = m.scale_embedding = gemma;
  m.post_norms = gemma3;
  if (deepseek) read_latents(r, m);
  else m.head_dim = r.positive("head_dim", type == "qwen3" ? 128 : gemma || next ? 256 : gpt_oss ? 64 : m.width / m.heads);
  if (gemma3 && r.number("query_pre_attn_scalar", 256.0) != static_cast<double>(m.head_dim))
    r.refuse("query_pre_attn_scalar", str("Sheaf's attention divides by the root of the head's width, ", m.head_dim));
  if (m.head_dim % 2 != 0) r.refuse("head_dim", "rotary positions turn pairs");
  // Qwen uses the window that it names if it says so, and then Qwen2 and Qwen3 not in the first layers, as dots.llm1 always. Where the file does not
  // even say null, transformers gives it and Mistral one.
  int64_t window = 0;
  if (!qwen || r.flag("use_sliding_window", false)) {
    if (!r.has("sliding_window")) window = gpt_oss ? 128 : qwen || dots1 || gemma3 || type == "mistral" ? 4096 : 0;
    else if (const Json* given = r.find("sliding_window"); given && !(*given == Json(false))) window = r.positive("sliding_window");
  }
  const bool by_layer = (qwen && !qwen3_moe) || dots1 || gemma3 || gpt_oss;
  const int64_t every = gemma3 ? r.positive("sliding_window_pattern", 6) : gpt_oss ? 2 : 0;
  const int64_t from = by_layer && window && !every ? r.whole("max_window_layers", dots1 ? 62 : 28) : 0;
  if (qwen3_moe && window && r.whole("max_window_layers", 0) != 0)
    r.refuse("max_window_layers", "some versions of transformers obey it here, others give all layers the window");
  const auto slides = [&](int64_t i) { return every ? (i + 1) % every != 0 : i >= from; };
  if (next) read_qwen3_next(r, part, m);
  else read_windows(r, window, gemma3 ? "sliding_window_pattern" : "max_window_layers", slides, m);
  if (gemma3 && m.window) m.window_rope_theta = window_theta;
  if (!by_layer && (m.full_attention_every || m.window != window))
    r.refuse("layer_types", str("with model_type ", type, " all layers have the window"));
  if (dots1 || deepseek) read_deepseek_experts(r, type, m);
  if (gpt_oss) read_gpt_oss(r, m);
  if (mixtral) {
    m.experts = r.positive("num_local_experts");
    m.experts_per_token = r.positive("num_experts_per_tok");
    if (r.number("router_jitter_noise", 0.0) != 0.0) r.refuse("router_jitter_noise", "Sheaf's routers have no noise");
  }
  if (qwen3_moe || next) {
    m.experts = r.positive(r.has("num_experts") ? "num_experts" : "num_local_experts");  // since version 5 of transformers
    m.experts_per_token = r.positive("num_experts_per_tok");
    m.expert_hidden = r.positive("moe_intermediate_size");
    m.normalize_experts = r.flag("norm_topk_prob", next);
    if (r.positive("decoder_sparse_step", 1) != 1) r.refuse("decoder_sparse_step", "Sheaf's layers all have experts, or none");
    if (const Json* dense = r.find("mlp_only_layers"); dense && !dense->as_array().empty())
      r.refuse("mlp_only_layers", "Sheaf's layers all have experts, or none");
  }
  return m;
}

// Which form weights have is seen from their names.
void check_quantization(const ConfigReader& r, const std::string& type) {
  const Json* how = r.find("quantization_config");
  const Json* method = type == "gpt_oss" && how && how->is_object() ? how->find("quant_method") : nullptr;
  if (!method || !(*method == Json("mxfp4")))
    r.only("quantization_config", false, "Sheaf reads weights in f32, f16 and bf16, and experts of gpt_oss in mxfp4");
}

}  // namespace

std::string published_config_file(const std::string& path) {
  std::error_code error;
  const std::string folder = std::filesystem::is_directory(path, error) ? path : parent_of(path);
  const std::string file = folder + "/config.json";
  return path_exists(file) ? file : "";
}

ModelConfig read_published_config(const std::string& file) {
  const ConfigReader r(file);
  const std::string type = r.text("model_type", "");
  check_quantization(r, type);
  ModelConfig m;
  if (type == "gpt2") m = read_gpt2(r);
  else if (std::ranges::find(kOfLlamasShape, type) != std::end(kOfLlamasShape)) m = read_llama(r, type);
  else r.refuse("model_type", "Sheaf has gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, deepseek_v2, deepseek_v3, gemma, gemma3_text, gpt_oss and qwen3_next");
  m.vocab = r.positive("vocab_size");
  return resolved(m);
}

}  // namespace sheaf::models
