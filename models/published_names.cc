#include "sheaf/models/published_names.h"

#include <algorithm>
#include <cctype>

#include "sheaf/core/error.h"
#include "sheaf/models/attention_window.h"
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

// The factors of an RMS norm, published minus 1 for Gemma and Qwen3-Next.
PublishedTensor norm_of(const ModelConfig& m, const std::string& name, int64_t width, const std::string& own) {
  return {.name = name + ".weight", .shape = {width}, .own = own + ".weight", .above_one = m.scale_embedding || m.attention_gate};
}

// Llama's MLP, or one of the same form.
void push_mlp(std::vector<PublishedTensor>& out, const std::string& name, const std::string& own, int64_t width, int64_t hidden) {
  out.push_back({name + ".gate_proj.weight", {hidden, width}, own + ".gate.weight"});
  out.push_back({name + ".up_proj.weight", {hidden, width}, own + ".up.weight"});
  out.push_back({name + ".down_proj.weight", {width, hidden}, own + ".down.weight"});
}

// Mixtral's experts, those of Qwen3 and dots.llm1, where queries and keys have norms, and those of DeepSeek. Each of our matrices has
// all experts, some rows each; joined, each expert has its gate's rows before up's. Shared experts with a gate are Qwen3-Next's,
// which has one, as wide as all of them.
void push_mixture(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& layer, const std::string& own, bool joined) {
  const int64_t c = m.width, hidden = m.expert_hidden, n = m.experts;
  const bool mixtral = !m.qk_norm && !m.kv_lora_rank && !m.expert_bias;
  const std::string name = layer + (mixtral ? ".block_sparse_moe." : ".mlp.");
  out.push_back({name + "gate.weight", {m.experts, c}, own + "router.weight"});
  if (m.expert_bias) out.push_back({name + "gate.e_score_correction_bias", {m.experts}, own + "choice_bias"});
  const std::string shared = name + (m.shared_expert_gate ? "shared_expert" : "shared_experts");
  if (m.shared_experts) push_mlp(out, shared, own + "shared", c, m.shared_experts * hidden);
  if (m.shared_expert_gate) out.push_back({name + "shared_expert_gate.weight", {1, c}, own + "shared_gate.weight"});
  if (joined) {
    const std::string halves[] = {own + "experts.gate", own + "experts.up"};
    for (int64_t k : {0, 1})
      out.push_back({.name = name + "experts.gate_up_proj", .shape = {n, 2 * hidden, c}, .own = halves[k], .part = {n * hidden, c},
                     .first = k * hidden * c, .run = hidden * c, .step = 2});
    out.push_back({.name = name + "experts.down_proj", .shape = {n, c, hidden}, .own = own + "experts.down", .part = {n * c, hidden}});
  }
  for (int64_t e = 0; e < n && !joined; ++e) {
    const std::string expert = str(name, "experts.", e, '.');
    out.push_back({expert + (mixtral ? "w1" : "gate_proj") + ".weight", {hidden, c}, own + "experts.gate", e * hidden});
    out.push_back({expert + (mixtral ? "w2" : "down_proj") + ".weight", {c, hidden}, own + "experts.down", e * c});
    out.push_back({expert + (mixtral ? "w3" : "up_proj") + ".weight", {hidden, c}, own + "experts.up", e * hidden});
  }
}

// gpt-oss's: the matrices of all experts are one tensor, in which gate and up alternate: by columns, [in, out], in the form of
// `transformers`, or by rows in MXFP4.
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

// A part of a published tensor: `rows` rows from its row `first` on, which are ours from `first_row` on.
PublishedTensor rows_of(const PublishedTensor& whole, int64_t first, int64_t rows, const std::string& own, int64_t first_row) {
  PublishedTensor t = whole;
  const int64_t row_size = whole.shape.numel() / whole.shape[0];
  t.own = own, t.first_row = first_row, t.part = whole.shape, t.part[0] = rows, t.first = first * row_size;
  return t;
}

// Phi-3's MLP: gate before up.
void push_fused_mlp(std::vector<PublishedTensor>& out, const std::string& name, const std::string& own, int64_t width, int64_t hidden) {
  const PublishedTensor both = {.name = name + ".gate_up_proj.weight", .shape = {2 * hidden, width}, .own = ""};
  out.push_back(rows_of(both, 0, hidden, own + ".gate.weight", 0));
  out.push_back(rows_of(both, hidden, hidden, own + ".up.weight", 0));
  out.push_back({name + ".down_proj.weight", {width, hidden}, own + ".down.weight"});
}

// A head of queries or keys, or the factors of their norm. In the published one the first `rotary_dim` elements are rotated, in ours
// the last.
void push_head(std::vector<PublishedTensor>& out, const ModelConfig& m, const PublishedTensor& whole, int64_t first, const std::string& own,
               int64_t first_row) {
  const int64_t rotated = m.rotary_dim ? m.rotary_dim : m.head_dim, others = m.head_dim - rotated;
  out.push_back(rows_of(whole, first, rotated, own, first_row + others));
  if (others) out.push_back(rows_of(whole, first + rotated, others, own, first_row));
}

// Queries, keys and values are three tensors, and one of ours. Both rotate halves of heads. If they rotate a part of each, or gates
// are published, each head's after its queries (Qwen3-Next's), heads are reordered one by one.
void push_attention(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& name, const std::string& own, bool fused) {
  const int64_t c = m.width, d = m.head_dim, q = m.heads * d, kv = m.kv_heads * d, of_head = m.attention_gate ? 2 * d : d;
  if (fused) {
    const PublishedTensor qkv = {name + ".qkv_proj.weight", {q + 2 * kv, c}, own + ".qkv.weight"};
    if (!m.rotary_dim) out.push_back(qkv);
    for (int64_t first = 0; m.rotary_dim && first < q + kv; first += d) push_head(out, m, qkv, first, qkv.own, first);
    if (m.rotary_dim) out.push_back(rows_of(qkv, q + kv, kv, qkv.own, q + kv));
    out.push_back({name + ".o_proj.weight", {c, q}, own + ".projection.weight"});
    return;
  }
  const bool by_heads = m.rotary_dim || m.attention_gate;
  const auto push_qkv = [&](const std::string& kind, auto shape_of) {
    const std::string qkv = own + ".qkv." + kind;
    const auto of = [&](const char* which, int64_t rows, int64_t first_row) {
      return PublishedTensor{.name = name + which + kind, .shape = shape_of(rows), .own = qkv, .first_row = first_row};
    };
    const PublishedTensor queries = of(".q_proj.", m.heads * of_head, 0), keys = of(".k_proj.", kv, q);
    if (!by_heads) out.insert(out.end(), {queries, keys});
    for (int64_t h = 0; by_heads && h < m.heads; ++h) {
      push_head(out, m, queries, h * of_head, qkv, h * d);
      if (m.attention_gate) out.push_back(rows_of(queries, h * of_head + d, d, own + ".gate." + kind, h * d));
    }
    for (int64_t h = 0; by_heads && h < m.kv_heads; ++h) push_head(out, m, keys, h * d, qkv, q + h * d);
    out.push_back(of(".v_proj.", kv, q + kv));
  };
  push_qkv("weight", [&](int64_t rows) { return Shape{rows, c}; });
  if (m.qkv_bias) push_qkv("bias", [](int64_t rows) { return Shape{rows}; });
  if (m.qk_norm) {
    const int64_t of_q = m.qk_norm_all_heads ? q : d, of_k = m.qk_norm_all_heads ? kv : d;
    for (const PublishedTensor& norm :
         {norm_of(m, name + ".q_norm", of_q, own + ".query_norm"), norm_of(m, name + ".k_norm", of_k, own + ".key_norm")}) {
      if (m.rotary_dim) push_head(out, m, norm, 0, norm.own, 0);
      else out.push_back(norm);
    }
  }
  out.push_back({name + ".o_proj.weight", {c, q}, own + ".projection.weight"});
  if (m.out_bias) out.push_back({name + ".o_proj.bias", {c}, own + ".projection.bias"});
  if (m.attention_sinks) out.push_back({name + ".sinks", {m.heads}, own + ".sinks"});
}

// Qwen3-Next's: everything of a key head, and of the value heads that read it, is adjacent; ours are all queries, all keys, and so
// on, as are Qwen3.5's, which are `apart` from gates and rates.
void push_linear_attention(std::vector<PublishedTensor>& out, const ModelConfig& m, const std::string& name, const std::string& own, bool apart) {
  const int64_t c = m.width, heads = m.linear_key_heads, d = m.linear_key_head_dim, readers = m.linear_value_heads / heads;
  const int64_t e = readers * m.linear_value_head_dim, keys = heads * d, values = heads * e;
  const std::string qkv = own + ".qkv.weight", rates = own + ".rates.weight";
  const PublishedTensor qkvz = {.name = name + ".in_proj_qkvz.weight", .shape = {2 * keys + 2 * values, c}, .own = ""},
                        ba = {.name = name + ".in_proj_ba.weight", .shape = {2 * m.linear_value_heads, c}, .own = ""};
  if (apart) {
    out.push_back({name + ".in_proj_qkv.weight", {2 * keys + values, c}, qkv});
    out.push_back({name + ".in_proj_z.weight", {values, c}, own + ".gate.weight"});
    out.push_back({name + ".in_proj_b.weight", {m.linear_value_heads, c}, rates});
    out.push_back({name + ".in_proj_a.weight", {m.linear_value_heads, c}, rates, m.linear_value_heads});
  }
  for (int64_t g = 0; g < heads && !apart; ++g) {
    const int64_t first = g * 2 * (d + e);
    out.push_back(rows_of(qkvz, first, d, qkv, g * d));
    out.push_back(rows_of(qkvz, first + d, d, qkv, keys + g * d));
    out.push_back(rows_of(qkvz, first + 2 * d, e, qkv, 2 * keys + g * e));
    out.push_back(rows_of(qkvz, first + 2 * d + e, e, own + ".gate.weight", g * e));
  }
  for (int64_t g = 0; g < heads && !apart; ++g)
    for (int64_t k : {0, 1}) out.push_back(rows_of(ba, (2 * g + k) * readers, readers, rates, k * m.linear_value_heads + g * readers));
  out.push_back({.name = name + ".conv1d.weight", .shape = {2 * keys + values, 1, m.linear_conv_kernel}, .own = own + ".taps",
                 .part = {2 * keys + values, m.linear_conv_kernel}});
  out.push_back({name + ".A_log", {m.linear_value_heads}, own + ".log_decay"});
  out.push_back({name + ".dt_bias", {m.linear_value_heads}, own + ".decay_bias"});
  out.push_back({name + ".norm.weight", {m.linear_value_head_dim}, own + ".norm.weight"});  // not less 1
  out.push_back({name + ".out_proj.weight", {c, values}, own + ".projection.weight"});
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
std::vector<PublishedTensor> llama_tensors(const ModelConfig& m, const PublishedForm& form) {
  std::vector<PublishedTensor> out;
  const int64_t c = m.width;
  const std::string prefix(kLlama);
  out.push_back({prefix + "embed_tokens.weight", {m.vocab, c}, "embedding.weight"});
  const auto push_block = [&](int64_t i, const std::string& own) {
    const std::string name = layer_name(i);
    if (m.pre_norms) out.push_back(norm_of(m, name + ".input_layernorm", c, own + ".attention_norm"));
    if (m.kv_lora_rank) push_latent_attention(out, m, name + ".self_attn", own + ".latent_attention");
    else if (is_linear_block(m, i)) push_linear_attention(out, m, name + ".linear_attn", own + ".linear_attention", form.linear_apart);
    else push_attention(out, m, name + ".self_attn", own + ".attention", form.fused);
    if (m.post_norms) {  // Gemma and OLMo use other models' name of the second for the first
      out.push_back(norm_of(m, name + ".post_attention_layernorm", c, own + ".attention_post_norm"));
      if (m.pre_norms) out.push_back(norm_of(m, name + ".pre_feedforward_layernorm", c, own + ".mlp_norm"));
      out.push_back(norm_of(m, name + ".post_feedforward_layernorm", c, own + ".mlp_post_norm"));
    } else {
      out.push_back(norm_of(m, name + ".post_attention_layernorm", c, own + ".mlp_norm"));
    }
    const bool mixture = m.experts && i >= m.dense_layers;
    if (mixture && m.expert_linear_bias) push_gpt_oss_mixture(out, m, name, own + ".moe.", form.mxfp4);
    else if (mixture) push_mixture(out, m, name, own + ".moe.", form.joined_experts);
    else if (form.fused) push_fused_mlp(out, name + ".mlp", own + ".mlp", c, m.mlp_width);
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

PublishedForm PublishedForm::of(const std::map<std::string, const SafetensorsFile*, std::less<>>& tensors) {
  const auto any = [&](std::string_view ending) {
    return std::ranges::any_of(tensors, [&](const auto& t) { return t.first.ends_with(ending); });
  };
  return {.mxfp4 = any(".experts.gate_up_proj_blocks"), .joined_experts = any(".experts.gate_up_proj"), .fused = any(".self_attn.qkv_proj.weight"),
          .linear_apart = any(".in_proj_qkv.weight")};
}

PublishedForm PublishedForm::to_write(const ModelConfig& model, const std::string& like) {
  const auto written_as = [&](const char* type) { return published_architecture(model, like) == type; };
  return {.fused = (like == "phi3" || model.rotary_dim) && written_as("phi3"), .linear_apart = model.linear_key_heads && !written_as("qwen3_next")};
}

std::vector<PublishedTensor> published_tensors(const ModelConfig& model, const PublishedForm& form) {
  const ModelConfig m = resolved(model);
  std::vector<PublishedTensor> out = m.type == "llama" ? llama_tensors(m, form) : gpt2_tensors(m);
  if (!m.tie_embeddings) out.push_back({"lm_head.weight", {m.vocab, m.width}, "head.weight"});
  return out;
}

std::string mtp_mark(int64_t layer) { return layer_name(layer) + ".eh_proj.weight"; }

std::string_view published_prefix(const ModelConfig& model) { return model.type == "llama" ? kLlama : kGpt2; }

bool is_redundant(const ModelConfig& model, std::string_view name) {
  if (name == "lm_head.weight") return model.tie_embeddings;
  if (model.linear_key_heads && name.starts_with("mtp.")) return true;  // Qwen3-Next's and Qwen3.5's, which `transformers` ignores, too
  if (model.type == "llama") return is_of_a_layer(name, "model.layers.", ".self_attn.rotary_emb.inv_freq");
  return is_of_a_layer(name, "transformer.h.", ".attn.bias") || is_of_a_layer(name, "transformer.h.", ".attn.masked_bias");
}

}  // namespace sheaf::models
