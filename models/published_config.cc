#include "sheaf/models/published_config.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "sheaf/core/file.h"
#include "sheaf/models/published_layers.h"
#include "sheaf/models/published_reader.h"

namespace sheaf::models {
namespace {

const std::string_view kOfLlamasShape[] = {"llama",       "mistral",     "mixtral",   "qwen2",       "qwen3", "qwen3_moe",
                                           "qwen3_next",  "qwen3_5_text", "qwen3_5_moe_text", "dots1", "glm4_moe", "deepseek_v2",
                                           "deepseek_v3", "kimi_k2",     "gemma",     "gemma2",      "gemma3_text", "gpt_oss", "smollm3",
                                           "olmo2",       "olmo3",       "olmoe",     "phi3"};

// Models of images and text, and the model_type of the latter, which "text_config" describes.
struct WithImages {
  std::string_view type, text;
};
constexpr WithImages kWithImages[] = {
    {"gemma3", "gemma3_text"}, {"mistral3", "mistral"}, {"qwen3_5", "qwen3_5_text"}, {"qwen3_5_moe", "qwen3_5_moe_text"}};

ModelConfig read_gpt2(const ConfigReader& r) {
  if (const std::string f = r.text("activation_function", "gelu_new"); f != "gelu_new" && f != "gelu_pytorch_tanh")
    r.refuse("activation_function", "Sheaf's gpt2 has gelu_new, which is gelu_pytorch_tanh");
  r.only("scale_attn_weights", true, "Sheaf's attention always divides by the root of the head's width");
  r.only("scale_attn_by_inverse_layer_idx", false, "Sheaf's attention does not depend on the layer");
  r.only("is_causal", true, "Sheaf's attention sees the tokens before");
  r.only("add_cross_attention", false, "Sheaf's gpt2 has no cross-attention");
  ModelConfig m;
  m.type = "gpt2";
  m.layers = r.layers("n_layer");
  m.heads = r.positive("n_head");
  m.width = r.positive("n_embd");
  m.mlp_width = r.positive("n_inner", 0);
  m.context = r.positive("n_positions");
  m.norm_eps = r.at_least(0, "layer_norm_epsilon", 1e-5);
  m.tie_embeddings = r.flag("tie_word_embeddings", true);
  m.bias = true;
  return m;
}

// Gemma's gelu under either of its keys, the first of which is wrong in some files.
void check_gemmas_gate(const ConfigReader& r) {
  const char* const key = r.find("hidden_activation") ? "hidden_activation" : "hidden_act";
  if (r.text(key, "gelu_pytorch_tanh") != "gelu_pytorch_tanh" && !(key == std::string_view("hidden_act") && r.text(key, "") == "gelu"))
    r.refuse(key, "Gemma's is gelu_pytorch_tanh");
}

// Models of one shape: Llama's, Mistral's, Mixtral's; Qwen2's, whose queries, keys and values have biases; Qwen3's, whose queries and
// keys have norms instead, also with mixtures of experts; dots.llm1's and GLM-4.5's, with mixtures of another kind; DeepSeek's, with
// those and attention of another kind; Gemma's, whose gates are gelus, and which have more norms, or cap logits; gpt-oss's, with
// biases for all matrices; Qwen3-Next's and Qwen3.5's, with linear attention; SmolLM3's, some of whose layers have no positions;
// OLMo's, which normalise the queries and keys of all heads together, and the outputs of layers, not their inputs; and Phi-3's and
// Phi-4's.
ModelConfig read_llama(const ConfigReader& r, const std::string& type) {
  const bool llama = type == "llama", mixtral = type == "mixtral", qwen3_moe = type == "qwen3_moe";
  const bool dots1 = type == "dots1", glm = type == "glm4_moe", deepseek = type.starts_with("deepseek") || type == "kimi_k2";
  const bool gemma = type.starts_with("gemma"), gemma2 = type == "gemma2", gemma3 = type == "gemma3_text", gpt_oss = type == "gpt_oss",
             smollm3 = type == "smollm3";
  const bool qwen3_5_moe = type == "qwen3_5_moe_text", linear = type == "qwen3_next" || type == "qwen3_5_text" || qwen3_5_moe;
  const bool olmo3 = type == "olmo3", olmoe = type == "olmoe", olmo = type == "olmo2" || olmo3 || olmoe, phi3 = type == "phi3";
  const bool qwen = type == "qwen2" || type == "qwen3" || qwen3_moe || linear;
  if (gemma) check_gemmas_gate(r);
  else if (r.text("hidden_act", "silu") != "silu") r.refuse("hidden_act", "Sheaf's llama has silu");
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (!gemma2) r.only(key, Json(), "of this model_type Sheaf's logits are not capped");
  if (!gpt_oss && !glm) r.only("attention_bias", false, "Sheaf's llama has no biases in both layers of attention");
  r.only("mlp_bias", false, "Sheaf's llama has no biases in MLPs");
  r.only("use_bidirectional_attention", false, "Sheaf's attention sees the tokens before");
  r.only("is_causal", true, "Sheaf's attention sees the tokens before");
  r.only("rope_interleaved", false, "Sheaf's rotary positions turn the halves of a head");
  if (!qwen) r.only("use_sliding_window", false, "that is a key of Qwen's");
  if (linear) r.only("use_sliding_window", false, str("full attention of ", type, " sees all tokens before").c_str());
  if (linear) r.only("attn_output_gate", true, str("attention of ", type, " has gates").c_str());
  if (llama || type == "gemma" || glm || smollm3 || (olmo && !olmo3))
    r.only("sliding_window", false, str("attention of ", type, " sees all tokens before").c_str());
  if (olmo) r.only("clip_qkv", Json(), "Sheaf's queries, keys and values are not clipped");
  double part = r.number("partial_rotary_factor", linear ? 0.25 : glm ? 0.5 : 1.0);
  const bool in_parts = linear || glm || phi3;
  if (!in_parts && part != 1.0) r.refuse("partial_rotary_factor", "Sheaf rotates whole heads of this model_type");
  ModelConfig m;
  m.type = "llama";
  m.layers = r.layers("num_hidden_layers");
  m.heads = gemma3 ? r.positive("num_attention_heads", 8) : r.positive("num_attention_heads");
  if (const char* key = "num_key_value_heads"; llama || deepseek || olmo || phi3) m.kv_heads = r.positive(key, m.heads);
  else m.kv_heads = gemma3 ? r.positive(key, 4) : r.positive(key);
  m.width = r.positive("hidden_size");
  m.mlp_width = r.positive(qwen3_5_moe ? "moe_intermediate_size" : "intermediate_size");
  m.context = gemma3 ? r.positive("max_position_embeddings", 131072) : r.positive("max_position_embeddings");
  m.norm_eps = r.at_least(0, "rms_norm_eps", mixtral || gpt_oss || glm || olmo || phi3 ? 1e-5 : 1e-6);
  m.rope_theta = r.at_least(1, "rope_theta", mixtral || gemma3 ? 1e6 : gpt_oss ? 150000.0 : smollm3 ? 2e6 : olmo3 ? 500000.0 : 10000.0);
  double window_theta = olmo3 ? m.rope_theta : r.at_least(1, "rope_local_base_freq", 10000.0);
  read_rotary(r, m, gemma3 || olmo3, window_theta, in_parts ? &part : nullptr);
  m.tie_embeddings = r.flag("tie_word_embeddings", gemma || smollm3);
  m.bias = false;
  m.qkv_bias = type == "qwen2" || (glm && r.flag("attention_bias", false));
  m.qk_norm_all_heads = olmo;
  m.qk_norm = olmo || type == "qwen3" || qwen3_moe || linear || dots1 || gemma3 || (glm && r.flag("use_qk_norm", false));
  m.attention_gate = linear;
  m.gelu_gate = m.scale_embedding = gemma;
  m.post_norms = gemma2 || gemma3 || (olmo && !olmoe);
  m.pre_norms = !olmo || olmoe;
  if (deepseek) read_latents(r, m);
  else m.head_dim = r.positive("head_dim", type == "qwen3" ? 128 : gemma || linear ? 256 : gpt_oss ? 64 : m.width / m.heads);
  if (m.head_dim % 2 != 0) r.refuse("head_dim", "rotary positions turn pairs");
  if (in_parts) read_rotated_part(r, part, m);
  if (gemma2) read_softcaps(r, m);
  if (const int64_t divisor = gemma2 || gemma3 ? r.positive("query_pre_attn_scalar", 256) : 0; divisor != m.head_dim)
    m.query_pre_attn_scalar = divisor;
  // Qwen uses its window only if a flag says so, and then Qwen2 and Qwen3 not in the first layers, as dots.llm1 always does. If the
  // key is missing altogether, transformers gives it and Mistral a window.
  int64_t window = 0;
  if (!qwen || r.flag("use_sliding_window", false)) {
    if (!r.has("sliding_window")) window = gpt_oss ? 128 : qwen || dots1 || gemma2 || gemma3 || type == "mistral" || olmo3 ? 4096 : 0;
    else if (const Json* given = r.find("sliding_window"); given && !(*given == Json(false))) window = r.positive("sliding_window");
  }
  const bool by_layer = (qwen && !qwen3_moe) || dots1 || gemma2 || gemma3 || gpt_oss || olmo3;
  const int64_t every = gemma3 ? r.positive("sliding_window_pattern", 6) : gpt_oss || gemma2 ? 2 : olmo3 ? 4 : 0;
  const int64_t from = by_layer && window && !every ? r.whole("max_window_layers", dots1 ? 62 : 28) : 0;
  if (qwen3_moe && window && r.whole("max_window_layers", 0) != 0)
    r.refuse("max_window_layers", "some versions of transformers obey it here, others give all layers the window");
  const auto slides = [&](int64_t i) { return every ? (i + 1) % every != 0 : i >= from; };
  if (linear) read_linear_attention(r, m);
  else read_windows(r, window, gemma3 ? "sliding_window_pattern" : "max_window_layers", slides, m);
  if ((gemma3 || olmo3) && m.window) m.window_rope_theta = window_theta;
  if (!by_layer && (m.full_attention_every || m.window != window))
    r.refuse("layer_types", str("with model_type ", type, " all layers have the window"));
  if (smollm3) read_nope(r, m);
  if (dots1 || glm || deepseek) read_deepseek_experts(r, type, m);
  if (gpt_oss) read_gpt_oss(r, m);
  if (mixtral) read_mixtral_experts(r, m);
  if (olmoe) read_olmoe_experts(r, m);
  if (qwen3_moe || qwen3_5_moe || type == "qwen3_next") read_qwen_experts(r, type, m);
  m.vocab = gemma3 ? r.positive("vocab_size", 262208) : r.positive("vocab_size");
  check_rotary_scaling(r, resolved(m));
  return m;
}

// The sizes of FP8's blocks, if weights are in it; which tensors are follows from the files.
std::optional<Fp8Block> fp8_block(const ConfigReader& r) {
  const Json* how = r.find("quantization_config");
  const Json* method = how && how->is_object() ? how->find("quant_method") : nullptr;
  if (!method || !(*method == Json("fp8"))) return {};
  const Json* sizes = how->find("weight_block_size");
  const auto is_size = [](const Json& size) { return size.is_int() && size.as_int() > 0 && size.as_int() <= ConfigReader::kLargest; };
  if (!sizes || !sizes->is_array() || sizes->as_array().size() != 2 || !std::ranges::all_of(sizes->as_array(), is_size))
    r.refuse("quantization_config", "Sheaf reads FP8 in blocks with a scale each: expected two sizes as weight_block_size");
  return Fp8Block{sizes->as_array()[0].as_int(), sizes->as_array()[1].as_int()};
}

// Whether weights are in MXFP4 follows from their names.
void check_quantization(const ConfigReader& r, const std::string& type) {
  const Json* how = r.find("quantization_config");
  const Json* method = type == "gpt_oss" && how && how->is_object() ? how->find("quant_method") : nullptr;
  if ((!method || !(*method == Json("mxfp4"))) && !fp8_block(r))
    r.only("quantization_config", false, "Sheaf reads weights in f32, f16 and bf16, in fp8 by blocks, and experts of gpt_oss in mxfp4");
}

// The part of a file that describes the text model, and its type.
std::pair<ConfigReader, std::string> model_of_text(const ConfigReader& whole) {
  std::string type = whole.text("model_type", "");
  const auto* const images = std::ranges::find(kWithImages, type, &WithImages::type);
  if (images == std::end(kWithImages)) return {whole, type};
  const ConfigReader r = whole.object("text_config");
  const std::string expected(images->text);
  if (r.text("model_type", expected.c_str()) != expected) r.refuse("model_type", str("of ", type, " Sheaf has the text model ", expected));
  return {r, expected};
}

}  // namespace

std::string published_config_file(const std::string& path) {
  std::error_code error;
  const std::string folder = std::filesystem::is_directory(path, error) ? path : parent_of(path);
  const std::string file = folder + "/config.json";
  return path_exists(file) ? file : "";
}

const Json* find_published(const Json& config, const char* key) {
  const Json* const value = config.find(key);
  const Json* const of_text = config.find("text_config");
  return value || !of_text || !of_text->is_object() ? value : of_text->find(key);
}

Fp8Block published_fp8_block(const std::string& file) { return fp8_block(ConfigReader(file)).value_or(Fp8Block{}); }

std::string published_type(const std::string& file) { return model_of_text(ConfigReader(file)).second; }

ModelConfig read_published_config(const std::string& file) {
  const ConfigReader whole(file);
  const auto [r, type] = model_of_text(whole);
  check_quantization(whole, type);
  if (type == "gpt2") {
    ModelConfig m = read_gpt2(r);
    m.vocab = r.positive("vocab_size");
    return resolved(m);
  }
  if (std::ranges::find(kOfLlamasShape, type) == std::end(kOfLlamasShape)) {
    std::string known = "Sheaf has gpt2";
    for (const std::string_view t : kOfLlamasShape) known += str(", ", t);
    for (const WithImages& t : kWithImages) known += str(", ", t.type);
    whole.refuse("model_type", known);
  }
  ModelConfig m = read_llama(r, type);
  m.tie_embeddings = whole.flag("tie_word_embeddings", m.tie_embeddings);  // a key of the whole model, which has the head, if there are
                                                                           // images
  return resolved(m);
}

}  // namespace sheaf::models
