#include "sheaf/models/published_config.h"

#include <filesystem>

#include "sheaf/core/file.h"

namespace sheaf::models {
namespace {

constexpr int64_t kLargest = 1'000'000'000;  // of any size; products of two fit 64 bits

// A config.json, where null means the same as nothing.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {
    const std::string text = File::open<CheckpointError>(file).read_all();
    try {
      json_ = Json::parse(text, file);
    } catch (const DataError& e) {
      fail<CheckpointError>("[weights] ", e.what());
    }
    if (!json_.is_object()) fail<CheckpointError>("[weights] ", file, " is not a JSON object");
  }

  const Json* find(const char* key) const {
    const Json* value = json_.find(key);
    return value && !value->is_null() ? value : nullptr;
  }
  [[noreturn]] void refuse(const char* key, const std::string& reason) const {
    std::string value = json_.find(key) ? json_.find(key)->dump() : "missing";
    if (value.size() > 80) value = value.substr(0, 80) + "...";
    fail<CheckpointError>("[weights] ", file_, ": ", key, " is ", value, ": ", reason);
  }

  int64_t positive(const char* key) const {
    const int64_t value = get(key, int64_t{0}, &Json::as_int);
    if (value <= 0 || value > kLargest) refuse(key, "expected a positive integer, at most 10^9");
    return value;
  }
  int64_t positive(const char* key, int64_t otherwise) const { return find(key) ? positive(key) : otherwise; }
  double number(const char* key, double otherwise) const { return get(key, otherwise, &Json::as_double); }
  bool flag(const char* key, bool otherwise) const { return get(key, otherwise, &Json::as_bool); }
  std::string text(const char* key, const char* otherwise) const {
    return get(key, std::string(otherwise), &Json::as_string);
  }

  /// Refuses a key that is there and says anything but `harmless`.
  void only(const char* key, const Json& harmless, const char* reason) const {
    if (const Json* value = find(key); value && !(*value == harmless)) refuse(key, reason);
  }

 private:
  template <class T, class R>
  T get(const char* key, T otherwise, R (Json::*as)() const) const {
    const Json* value = find(key);
    if (!value) return otherwise;
    try {
      return (value->*as)();
    } catch (const DataError& e) {
      fail<CheckpointError>("[weights] ", file_, ": ", key, ": ", e.what());
    }
  }

  std::string file_;
  Json json_;
};

ModelConfig read_gpt2(const Reader& r) {
  if (const std::string f = r.text("activation_function", "gelu_new"); f != "gelu_new" && f != "gelu_pytorch_tanh")
    r.refuse("activation_function", "Sheaf's gpt2 has gelu_new, which is gelu_pytorch_tanh");
  r.only("scale_attn_weights", true, "Sheaf's attention always divides by the root of the head's width");
  r.only("scale_attn_by_inverse_layer_idx", false, "Sheaf's attention does not depend on the layer");
  r.only("add_cross_attention", false, "Sheaf's gpt2 has no cross-attention");
  ModelConfig m;
  m.type = "gpt2";
  m.layers = r.positive("n_layer");
  m.heads = r.positive("n_head");
  m.width = r.positive("n_embd");
  m.mlp_width = r.positive("n_inner", 0);
  m.context = r.positive("n_positions");
  m.norm_eps = r.number("layer_norm_epsilon", 1e-5);
  m.tie_embeddings = r.flag("tie_word_embeddings", true);
  m.bias = true;
  return m;
}

// "rope_theta" and "rope_scaling", or since version 5 of transformers both in "rope_parameters".
double read_rope_theta(const Reader& r) {
  const double theta = r.number("rope_theta", 10000.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* rope = r.find(key);
    if (!rope) continue;
    if (!rope->is_object()) r.refuse(key, "expected an object");
    for (const char* type : {"rope_type", "type"})
      if (const Json* value = rope->find(type); value && !(*value == Json("default")))
        r.refuse(key, "Sheaf's rotary positions are not scaled (rope_type default)");
    if (const Json* factor = rope->find("partial_rotary_factor"); factor && !(*factor == Json(1.0) || *factor == Json(1)))
      r.refuse(key, "Sheaf rotates whole heads");
  }
  const Json* rope = r.find("rope_parameters");
  const Json* own = rope ? rope->find("rope_theta") : nullptr;
  if (!own) return theta;
  try {
    return own->as_double();
  } catch (const DataError&) {
    r.refuse("rope_parameters", "rope_theta is not a number");
  }
}

ModelConfig read_llama(const Reader& r) {
  if (r.text("hidden_act", "silu") != "silu") r.refuse("hidden_act", "Sheaf's llama has silu");
  r.only("attention_bias", false, "Sheaf's llama has no biases");
  r.only("mlp_bias", false, "Sheaf's llama has no biases");
  r.only("rope_interleaved", false, "Sheaf's rotary positions turn the halves of a head");
  for (const char* key : {"sliding_window", "use_sliding_window"})
    r.only(key, false, "Sheaf's attention sees all tokens before");
  if (const Json* types = r.find("layer_types"); types && types->dump().find("sliding") != std::string::npos)
    r.refuse("layer_types", "Sheaf's attention sees all tokens before");
  if (r.number("partial_rotary_factor", 1.0) != 1.0) r.refuse("partial_rotary_factor", "Sheaf rotates whole heads");
  ModelConfig m;
  m.type = "llama";
  m.layers = r.positive("num_hidden_layers");
  m.heads = r.positive("num_attention_heads");
  m.kv_heads = r.positive("num_key_value_heads", m.heads);
  m.width = r.positive("hidden_size");
  m.mlp_width = r.positive("intermediate_size");
  m.context = r.positive("max_position_embeddings");
  m.norm_eps = r.number("rms_norm_eps", 1e-6);
  m.rope_theta = read_rope_theta(r);
  m.tie_embeddings = r.flag("tie_word_embeddings", false);
  m.bias = false;
  if (r.find("head_dim") && r.positive("head_dim") != m.width / m.heads)
    r.refuse("head_dim", str("Sheaf's heads are width / heads = ", m.width, " / ", m.heads, " wide"));
  return m;
}

}  // namespace

std::string published_config_file(const std::string& path) {
  std::error_code error;
  const std::string folder = std::filesystem::is_directory(path, error) ? path : parent_of(path);
  const std::string file = folder + "/config.json";
  return path_exists(file) ? file : "";
}

ModelConfig read_published_config(const std::string& file) {
  const Reader r(file);
  r.only("quantization_config", false, "Sheaf reads weights in f32, f16 and bf16");
  const std::string type = r.text("model_type", "");
  ModelConfig m;
  if (type == "gpt2") m = read_gpt2(r);
  else if (type == "llama") m = read_llama(r);
  else r.refuse("model_type", "Sheaf has gpt2 and llama");
  m.vocab = r.positive("vocab_size");
  return resolved(m);
}

void check_published_shape(const ModelConfig& model, const ModelConfig& published, const std::string& file) {
  const ModelConfig m = resolved(model);
  const auto same = [&](const char* key, const auto& ours, const auto& theirs) {
    if (!(ours == theirs)) fail<ConfigError>("[weights] model.", key, " is ", ours, ", but ", theirs, " in ", file);
  };
  same("type", m.type, published.type);
  same("layers", m.layers, published.layers);
  same("heads", m.heads, published.heads);
  same("kv_heads", m.kv_heads, published.kv_heads);
  same("width", m.width, published.width);
  same("mlp_width", m.mlp_width, published.mlp_width);
  same("vocab", m.vocab, published.vocab);
  same("tie_embeddings", m.tie_embeddings, published.tie_embeddings);
  same("norm_eps", m.norm_eps, published.norm_eps);
  if (m.type == "gpt2") same("bias", m.bias, published.bias);
  if (m.type == "llama") same("rope_theta", m.rope_theta, published.rope_theta);
  if (m.context > published.context)
    fail<ConfigError>("[weights] model.context is ", m.context, ", more than the ", published.context, " of ", file);
}

Json published_config(const ModelConfig& model) {
  const ModelConfig m = resolved(model);
  const bool gpt2 = m.type == "gpt2";
  Json json;
  json.set("model_type", m.type)
      .set("architectures", Json::Array{gpt2 ? "GPT2LMHeadModel" : "LlamaForCausalLM"})
      .set("torch_dtype", "float32")
      .set("vocab_size", m.vocab)
      .set("tie_word_embeddings", m.tie_embeddings)
      .set("bos_token_id", Json())
      .set("eos_token_id", Json());
  if (gpt2) {
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
  } else {
    json.set("num_hidden_layers", m.layers)
        .set("num_attention_heads", m.heads)
        .set("num_key_value_heads", m.kv_heads)
        .set("hidden_size", m.width)
        .set("intermediate_size", m.mlp_width)
        .set("max_position_embeddings", m.context)
        .set("hidden_act", "silu")
        .set("rms_norm_eps", m.norm_eps)
        .set("rope_theta", m.rope_theta)
        .set("rope_scaling", Json())
        .set("attention_bias", false)
        .set("mlp_bias", false);
  }
  return json;
}

}  // namespace sheaf::models
