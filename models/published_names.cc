#include "sheaf/models/published_names.h"

#include <algorithm>
#include <cctype>

#include "sheaf/core/error.h"

namespace sheaf::models {
namespace {

constexpr std::string_view kGpt2 = "transformer.", kLlama = "model.";

// GPT-2's linear layers are published as [in, out] (its "Conv1D"). Queries, keys and values are packed as ours are.
std::vector<PublishedTensor> gpt2_tensors(const ModelConfig& m) {
  std::vector<PublishedTensor> out;
  const int64_t c = m.width;
  const std::string prefix(kGpt2);
  const auto norm = [&](const std::string& name, const std::string& own) {
    out.push_back({name + ".weight", {c}, own + ".weight"});
    if (m.bias) out.push_back({name + ".bias", {c}, own + ".bias"});
  };
  const auto linear = [&](const std::string& name, const std::string& own, int64_t from, int64_t to) {
    out.push_back({.name = name + ".weight", .shape = {from, to}, .own = own + ".weight", .transposed = true});
    if (m.bias) out.push_back({name + ".bias", {to}, own + ".bias"});
  };
  out.push_back({prefix + "wte.weight", {m.vocab, c}, "wte.weight"});
  out.push_back({.name = prefix + "wpe.weight", .shape = {m.context, c}, .own = "wpe.weight", .more_rows = true});
  for (int64_t i = 0; i < m.layers; ++i) {
    const std::string name = str(prefix, "h.", i), own = str("blocks.", i);
    norm(name + ".ln_1", own + ".ln1");
    linear(name + ".attn.c_attn", own + ".attention.qkv", c, 3 * c);
    linear(name + ".attn.c_proj", own + ".attention.projection", c, c);
    norm(name + ".ln_2", own + ".ln2");
    linear(name + ".mlp.c_fc", own + ".mlp.up", c, m.mlp_width);
    linear(name + ".mlp.c_proj", own + ".mlp.down", m.mlp_width, c);
  }
  norm(prefix + "ln_f", "ln_f");
  return out;
}

// Llama's MLP, or what has its form.
void push_mlp(std::vector<PublishedTensor>& out, const std::string& name, const std::string& own, int64_t width, int64_t hidden) {
  out.push_back({name + ".gate_proj.weight", {hidden, width}, own + ".gate.weight"});
  out.push_back({name + ".up_proj.weight", {hidden, width}, own + ".up.weight"});
  out.push_back({name + ".down_proj.weight", {width, hidden}, own + ".down.weight"});
}

// Mixtral's, or those of Qwen3's and dots.llm1's, where queries and keys have norms. The matrices of all experts are one of ours, of
// which each is some rows.
void push_mixture(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& layer, const std::string& own) {
  const int64_t c = m.width, hidden = m.expert_hidden;
  const std::string name = layer + (m.qk_norm ? ".mlp." : ".block_sparse_moe.");
  out.push_back({name + "gate.weight", {m.experts, c}, own + "router.weight"});
  if (m.expert_bias) out.push_back({name + "gate.e_score_correction_bias", {m.experts}, own + "choice_bias"});
  if (m.shared_experts) push_mlp(out, name + "shared_experts", own + "shared", c, m.shared_experts * hidden);
  for (int64_t e = 0; e < m.experts; ++e) {
    const std::string expert = str(name, "experts.", e, '.');
    out.push_back({expert + (m.qk_norm ? "gate_proj" : "w1") + ".weight", {hidden, c}, own + "experts.gate", e * hidden});
    out.push_back({expert + (m.qk_norm ? "down_proj" : "w2") + ".weight", {c, hidden}, own + "experts.down", e * c});
    out.push_back({expert + (m.qk_norm ? "up_proj" : "w3") + ".weight", {hidden, c}, own + "experts.up", e * hidden});
  }
}

// Llama's are [out, in]; queries, keys and values are three tensors, and one of ours. Both rotate halves of heads.
std::vector<PublishedTensor> llama_tensors(const ModelConfig& m) {
  std::vector<PublishedTensor> out;
  const int64_t c = m.width, q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  const std::string prefix(kLlama);
  out.push_back({prefix + "embed_tokens.weight", {m.vocab, c}, "embedding.weight"});
  for (int64_t i = 0; i < m.layers; ++i) {
    const std::string name = str(prefix, "layers.", i), own = str("blocks.", i), qkv = own + ".attention.qkv.weight";
    out.push_back({name + ".input_layernorm.weight", {c}, own + ".attention_norm.weight"});
    out.push_back({name + ".self_attn.q_proj.weight", {q, c}, qkv});
    out.push_back({name + ".self_attn.k_proj.weight", {kv, c}, qkv, q});
    out.push_back({name + ".self_attn.v_proj.weight", {kv, c}, qkv, q + kv});
    if (m.qkv_bias) {
      const std::string bias = own + ".attention.qkv.bias";
      out.push_back({name + ".self_attn.q_proj.bias", {q}, bias});
      out.push_back({name + ".self_attn.k_proj.bias", {kv}, bias, q});
      out.push_back({name + ".self_attn.v_proj.bias", {kv}, bias, q + kv});
    }
    if (m.qk_norm) {
      out.push_back({name + ".self_attn.q_norm.weight", {m.head_dim}, own + ".attention.query_norm.weight"});
      out.push_back({name + ".self_attn.k_norm.weight", {m.head_dim}, own + ".attention.key_norm.weight"});
    }
    out.push_back({name + ".self_attn.o_proj.weight", {c, q}, own + ".attention.projection.weight"});
    out.push_back({name + ".post_attention_layernorm.weight", {c}, own + ".mlp_norm.weight"});
    if (m.experts && i >= m.dense_layers) push_mixture(out, m, name, own + ".moe.");
    else push_mlp(out, name + ".mlp", own + ".mlp", c, m.mlp_width);
  }
  out.push_back({prefix + "norm.weight", {c}, "norm.weight"});
  return out;
}

// "<prefix><digits><suffix>"
bool is_of_a_layer(std::string_view name, std::string_view prefix, std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix) || name.size() <= prefix.size() + suffix.size()) return false;
  const std::string_view layer = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  return std::all_of(layer.begin(), layer.end(), [](unsigned char x) { return std::isdigit(x); });
}

}  // namespace

std::vector<PublishedTensor> published_tensors(const ModelConfig& model) {
  const ModelConfig m = resolved(model);
  std::vector<PublishedTensor> out = m.type == "llama" ? llama_tensors(m) : gpt2_tensors(m);
  if (!m.tie_embeddings) out.push_back({"lm_head.weight", {m.vocab, m.width}, "head.weight"});
  return out;
}

std::string_view published_prefix(const ModelConfig& model) { return model.type == "llama" ? kLlama : kGpt2; }

bool is_redundant(const ModelConfig& model, std::string_view name) {
  if (name == "lm_head.weight") return model.tie_embeddings;
  if (model.type == "llama") return is_of_a_layer(name, "model.layers.", ".self_attn.rotary_emb.inv_freq");
  return is_of_a_layer(name, "transformer.h.", ".attn.bias") || is_of_a_layer(name, "transformer.h.", ".attn.masked_bias");
}

}  // namespace sheaf::models
