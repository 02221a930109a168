#include "sheaf/models/published_names.h"

#include <algorithm>
#include <cctype>

#include "sheaf/core/error.h"
#include "sheaf/models/published_config.h"

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

// An RMS norm's.
PublishedTensor norm_of(const ModelConfig& m, const std::string& name, int64_t width, const std::string& own) {
  return {.name = name + ".weight", .shape = {width}, .own = own + ".weight", .above_one = m.scale_embedding};
}

// Llama's MLP, or what has its form.
void push_mlp(std::vector<PublishedTensor>& out, const std::string& name, const std::string& own, int64_t width, int64_t hidden) {
  out.push_back({name + ".gate_proj.weight", {hidden, width}, own + ".gate.weight"});
  out.push_back({name + ".up_proj.weight", {hidden, width}, own + ".up.weight"});
  out.push_back({name + ".down_proj.weight", {width, hidden}, own + ".down.weight"});
}

// Mixtral's, or those of Qwen3's and dots.llm1's, where queries and keys have norms, and of DeepSeek's. The matrices of all experts are
// one of ours, of which each is some rows.
void push_mixture(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& layer, const std::string& own) {
  const int64_t c = m.width, hidden = m.expert_hidden;
  const bool mixtral = !m.qk_norm && !m.kv_lora_rank;
  const std::string name = layer + (mixtral ? ".block_sparse_moe." : ".mlp.");
  out.push_back({name + "gate.weight", {m.experts, c}, own + "router.weight"});
  if (m.expert_bias) out.push_back({name + "gate.e_score_correction_bias", {m.experts}, own + "choice_bias"});
  if (m.shared_experts) push_mlp(out, name + "shared_experts", own + "shared", c, m.shared_experts * hidden);
  for (int64_t e = 0; e < m.experts; ++e) {
    const std::string expert = str(name, "experts.", e, '.');
    out.push_back({expert + (mixtral ? "w1" : "gate_proj") + ".weight", {hidden, c}, own + "experts.gate", e * hidden});
    out.push_back({expert + (mixtral ? "w2" : "down_proj") + ".weight", {c, hidden}, own + "experts.down", e * c});
    out.push_back({expert + (mixtral ? "w3" : "up_proj") + ".weight", {hidden, c}, own + "experts.up", e * hidden});
  }
}

// gpt-oss's: the matrices of all experts are one tensor, in which gates and what they are multiplied with take turns: by columns, as
// `transformers` has them, [in, out], or by rows in MXFP4.
void push_gpt_oss_mixture(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& layer, const std::string& own, bool mxfp4) {
  const int64_t n = m.experts, c = m.width, hidden = m.expert_hidden;
  const std::string name = layer + ".mlp.", experts = name + "experts.", both = experts + "gate_up_proj", down = experts + "down_proj";
  const std::string halves[] = {own + "experts.gate", own + "experts.up"};
  out.push_back({name + "router.weight", {n, c}, own + "router.weight"});
  out.push_back({name + "router.bias", {n}, own + "router.bias"});
  if (mxfp4) {
    for (int64_t k : {0, 1})
      out.push_back({.name = both, .shape = {n, 2 * hidden, c}, .own = halves[k], .part = {n * hidden, c}, .first = k * c, .run = c, .step = 2,
                     .mxfp4 = true});
    out.push_back({.name = down, .shape = {n, c, hidden}, .own = own + "experts.down", .part = {n * c, hidden}, .mxfp4 = true});
  } else {
    for (int64_t e = 0; e < n; ++e)
      for (int64_t k : {0, 1})
        out.push_back({.name = both, .shape = {n, c, 2 * hidden}, .own = halves[k], .first_row = e * hidden, .transposed = true,
                       .part = {c, hidden}, .first = e * c * 2 * hidden + k, .step = 2});
    for (int64_t e = 0; e < n; ++e)
      out.push_back({.name = down, .shape = {n, hidden, c}, .own = own + "experts.down", .first_row = e * c, .transposed = true,
                     .part = {hidden, c}, .first = e * hidden * c});
  }
  for (int64_t k : {0, 1})
    out.push_back({.name = both + "_bias", .shape = {n, 2 * hidden}, .own = halves[k] + "_bias", .part = {n * hidden}, .first = k, .step = 2});
  out.push_back({down + "_bias", {n, c}, own + "experts.down_bias"});
}

// Queries, keys and values are three tensors, and one of ours. Both rotate halves of heads.
void push_attention(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& name, const std::string& own) {
  const int64_t c = m.width, q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  const std::string qkv = own + ".qkv.weight", bias = own + ".qkv.bias";
  out.push_back({name + ".q_proj.weight", {q, c}, qkv});
  out.push_back({name + ".k_proj.weight", {kv, c}, qkv, q});
  out.push_back({name + ".v_proj.weight", {kv, c}, qkv, q + kv});
  if (m.qkv_bias) {
    out.push_back({name + ".q_proj.bias", {q}, bias});
    out.push_back({name + ".k_proj.bias", {kv}, bias, q});
    out.push_back({name + ".v_proj.bias", {kv}, bias, q + kv});
  }
  if (m.qk_norm) {
    out.push_back(norm_of(m, name + ".q_norm", m.head_dim, own + ".query_norm"));
    out.push_back(norm_of(m, name + ".k_norm", m.head_dim, own + ".key_norm"));
  }
  out.push_back({name + ".o_proj.weight", {c, q}, own + ".projection.weight"});
  if (m.out_bias) out.push_back({name + ".o_proj.bias", {c}, own + ".projection.bias"});
  if (m.attention_sinks) out.push_back({name + ".sinks", {m.heads}, own + ".sinks"});
}

// The projections to latents are two, or one, and one of ours. Both rotate neighbours.
void push_latent_attention(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& name, const std::string& own) {
  const int64_t c = m.width, of_q = m.q_lora_rank, of_kv = m.kv_lora_rank, q = m.heads * m.head_dim;
  if (of_q) {
    out.push_back({name + ".q_a_proj.weight", {of_q, c}, own + ".latents.weight"});
    out.push_back({name + ".q_a_layernorm.weight", {of_q}, own + ".query_norm.weight"});
    out.push_back({name + ".q_b_proj.weight", {q, of_q}, own + ".queries.weight"});
  } else {
    out.push_back({name + ".q_proj.weight", {q, c}, own + ".queries.weight"});
  }
  out.push_back({name + ".kv_a_proj_with_mqa.weight", {of_kv + m.qk_rope_head_dim, c}, own + ".latents.weight", of_q});
  out.push_back({name + ".kv_a_layernorm.weight", {of_kv}, own + ".latent_norm.weight"});
  out.push_back({name + ".kv_b_proj.weight", {m.heads * (m.qk_nope_head_dim + m.v_head_dim), of_kv}, own + ".keys_values.weight"});
  out.push_back({name + ".o_proj.weight", {c, m.heads * m.v_head_dim}, own + ".projection.weight"});
}

std::string layer_name(int64_t i) { return str(kLlama, "layers.", i); }

// Llama's are [out, in].
std::vector<PublishedTensor> llama_tensors(const ModelConfig& m, bool mxfp4) {
  std::vector<PublishedTensor> out;
  const int64_t c = m.width;
  const std::string prefix(kLlama);
  out.push_back({prefix + "embed_tokens.weight", {m.vocab, c}, "embedding.weight"});
  const auto push_block = [&](int64_t i, const std::string& own) {
    const std::string name = layer_name(i);
    out.push_back(norm_of(m, name + ".input_layernorm", c, own + ".attention_norm"));
    if (m.kv_lora_rank) push_latent_attention(out, m, name + ".self_attn", own + ".latent_attention");
    else push_attention(out, m, name + ".self_attn", own + ".attention");
    if (m.post_norms) {  // Gemma's name of the first is that of the others' second
      out.push_back(norm_of(m, name + ".post_attention_layernorm", c, own + ".attention_post_norm"));
      out.push_back(norm_of(m, name + ".pre_feedforward_layernorm", c, own + ".mlp_norm"));
      out.push_back(norm_of(m, name + ".post_feedforward_layernorm", c, own + ".mlp_post_norm"));
    } else {
      out.push_back(norm_of(m, name + ".post_attention_layernorm", c, own + ".mlp_norm"));
    }
    const bool mixture = m.experts && i >= m.dense_layers;
    if (mixture && m.expert_linear_bias) push_gpt_oss_mixture(out, m, name, own + ".moe.", mxfp4);
    else if (mixture) push_mixture(out, m, name, own + ".moe.");
    else push_mlp(out, name + ".mlp", own + ".mlp", c, m.mlp_width);
  };
  for (int64_t i = 0; i < m.layers; ++i) push_block(i, str("blocks.", i));
  out.push_back(norm_of(m, prefix + "norm", c, "norm"));
  for (int64_t k = 0; publishes_mtp(m) && k < m.mtp_layers; ++k) {
    const size_t before = out.size();
    const std::string name = layer_name(m.layers + k) + '.', own = str("mtp_layers.", k);
    push_block(m.layers + k, own);
    out.push_back(norm_of(m, name + "enorm", c, own + ".token_norm"));
    out.push_back(norm_of(m, name + "hnorm", c, own + ".hidden_norm"));
    out.push_back({mtp_mark(m.layers + k), {c, 2 * c}, own + ".join.weight"});
    out.push_back(norm_of(m, name + "shared_head.norm", c, own + ".norm"));
    const std::string head = m.tie_embeddings ? "embedding.weight" : "head.weight";
    out.push_back({.name = name + "embed_tokens.weight", .shape = {m.vocab, c}, .own = "embedding.weight", .repeats = true});
    out.push_back({.name = name + "shared_head.head.weight", .shape = {m.vocab, c}, .own = head, .repeats = true});
    for (size_t i = before; i < out.size(); ++i) out[i].mtp_layer = k;
  }
  return out;
}

// "<prefix><digits><suffix>"
bool is_of_a_layer(std::string_view name, std::string_view prefix, std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix) || name.size() <= prefix.size() + suffix.size()) return false;
  const std::string_view layer = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  return std::all_of(layer.begin(), layer.end(), [](unsigned char x) { return std::isdigit(x); });
}

}  // namespace

std::vector<PublishedTensor> published_tensors(const ModelConfig& model, bool mxfp4) {
  const ModelConfig m = resolved(model);
  std::vector<PublishedTensor> out = m.type == "llama" ? llama_tensors(m, mxfp4) : gpt2_tensors(m);
  if (!m.tie_embeddings) out.push_back({"lm_head.weight", {m.vocab, m.width}, "head.weight"});
  return out;
}

std::string mtp_mark(int64_t layer) { return layer_name(layer) + ".eh_proj.weight"; }

std::string_view published_prefix(const ModelConfig& model) { return model.type == "llama" ? kLlama : kGpt2; }

bool is_redundant(const ModelConfig& model, std::string_view name) {
  if (name == "lm_head.weight") return model.tie_embeddings;
  if (model.type == "llama") return is_of_a_layer(name, "model.layers.", ".self_attn.rotary_emb.inv_freq");
  return is_of_a_layer(name, "transformer.h.", ".attn.bias") || is_of_a_layer(name, "transformer.h.", ".attn.masked_bias");
}

}  // namespace sheaf::models
