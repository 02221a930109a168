#include "sheaf/models/language_model.h"

#include "sheaf/models/gpt.h"
#include "sheaf/models/llama.h"
#include "sheaf/nn/lora.h"

namespace sheaf::models {
namespace {

nn::Affinity affinity_of(const std::string& name) {
  check<ConfigError>(name == "softmax" || name == "sigmoid", "[model] unknown expert_affinity '", name, "'; known: softmax, sigmoid");
  return name == "sigmoid" ? nn::Affinity::sigmoid : nn::Affinity::softmax;
}

std::unique_ptr<Decoder> without_adapters(const ModelConfig& m, int64_t vocab) {
  const int64_t words = m.vocab ? m.vocab : vocab;
  if (words <= 0) fail<ConfigError>("[model] the size of the vocabulary is not known: give model.vocab");
  if (m.type == "gpt2") {
    check<ConfigError>(m.experts == 0, "[model] model.experts ", m.experts, ": only model.type llama has mixtures of experts");
    GptConfig c;
    c.layers = m.layers;
    c.heads = m.heads;
    c.width = m.width;
    c.context = m.context;
    c.vocab = words;
    c.mlp_width = m.mlp_width;
    c.bias = m.bias;
    c.dropout = m.dropout;
    c.tie_embeddings = m.tie_embeddings;
    c.norm_eps = m.norm_eps;
    c.window = m.window;
    c.full_attention_every = m.full_attention_every;
    c.end_of_text = m.end_of_text;
    return std::make_unique<Gpt>(c);
  }
  if (m.type == "llama") {
    LlamaConfig c;
    c.layers = m.layers;
    c.heads = m.heads;
    c.kv_heads = m.kv_heads;
    c.width = m.width;
    c.mlp_width = m.mlp_width;
    c.context = m.context;
    c.vocab = words;
    c.head_dim = m.head_dim;
    c.qkv_bias = m.qkv_bias;
    c.qk_norm = m.qk_norm;
    c.rope_theta = m.rope_theta;
    c.rope_scaling = rotary_scaling(m.rope_scaling);
    c.norm_eps = m.norm_eps;
    c.dropout = m.dropout;
    c.tie_embeddings = m.tie_embeddings;
    c.experts = m.experts;
    c.experts_per_token = m.experts_per_token;
    c.expert_hidden = m.expert_hidden;
    c.capacity_factor = m.capacity_factor;
    c.expert_groups = m.expert_groups;
    c.normalize_experts = m.normalize_experts;
    c.expert_affinity = affinity_of(m.expert_affinity);
    c.expert_bias = m.expert_bias;
    c.expert_balance_rate = m.expert_balance_rate;
    c.expert_scale = m.expert_scale;
    c.expert_parts = m.expert_parts;
    c.expert_parts_per_token = m.expert_parts_per_token;
    c.shared_experts = m.shared_experts;
    c.dense_layers = m.dense_layers;
    c.aux_loss = m.aux_loss;
    c.window = m.window;
    c.full_attention_every = m.full_attention_every;
    c.end_of_text = m.end_of_text;
    return std::make_unique<Llama>(c);
  }
  fail<ConfigError>("[model] unknown type '", m.type, "'; known: gpt2, llama");
}

}  // namespace

std::unique_ptr<Decoder> make_language_model(const ModelConfig& config, int64_t vocab) {
  const ModelConfig m = resolved(config);
  std::unique_ptr<Decoder> model = without_adapters(m, vocab);
  if (m.lora_rank == 0) return model;
  const nn::LoraOptions options{.rank = m.lora_rank, .alpha = m.lora_alpha};
  const int64_t adapters = nn::add_lora(*model, options, [&](const std::string& path) { return takes_lora(path, m.lora_layers); });
  check<ConfigError>(adapters > 0, "[model] lora_layers '", m.lora_layers, "': this ", m.type, " has no such linear layers; its MLPs are ",
                     "mixtures of ", m.experts, " experts, of which only shared ones have adapters");
  return model;
}

}  // namespace sheaf::models
