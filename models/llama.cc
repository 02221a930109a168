#include "sheaf/models/llama.h"

#include "sheaf/models/attention_window.h"
#include "sheaf/nn/layers/stages.h"

namespace sheaf::models {
namespace {

// Of both kinds of attention.
template <class Config>
void set_window_and_rotary(Config& a, const LlamaConfig& c, int64_t block) {
  a.window = window_of_block(block, c.window, c.full_attention_every);
  a.rope_theta = c.rope_theta;
  a.rope_scaling = c.rope_scaling;
  if (a.window && c.window_rope_theta != 0) a.rope_theta = c.window_rope_theta, a.rope_scaling = {};
}

nn::AttentionConfig attention_config(const LlamaConfig& c, int64_t block) {
  nn::AttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.kv_heads = c.kv_heads;
  a.head_width = c.head_dim;
  a.bias = false;
  a.qkv_bias = c.qkv_bias;
  a.out_bias = c.out_bias;
  a.gate = c.attention_gate;
  a.sinks = c.attention_sinks;
  a.qk_norm = c.qk_norm;
  a.norm_eps = c.norm_eps;
  a.rotary_width = c.rotary_width;
  set_window_and_rotary(a, c, block);
  a.dropout = c.dropout;
  a.init = weight_init();
  a.projection_init = residual_init(c.layers);
  return a;
}

nn::LatentAttentionConfig latent_attention_config(const LlamaConfig& c, int64_t block) {
  const double mscale = c.mscale_all_dim == 0 ? 1.0 : RotaryScaling::yarn_amplitude(c.rope_scaling.factor, c.mscale_all_dim);
  nn::LatentAttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.q_lora_rank = c.q_lora_rank;
  a.kv_lora_rank = c.kv_lora_rank;
  a.qk_nope_head_dim = c.qk_nope_head_dim ? c.qk_nope_head_dim : c.width / c.heads;
  a.qk_rope_head_dim = c.qk_rope_head_dim ? c.qk_rope_head_dim : a.qk_nope_head_dim / 2;
  a.v_head_dim = c.v_head_dim ? c.v_head_dim : a.qk_nope_head_dim;  // norm_eps stays: DeepSeek's latents have theirs, whatever others have
  set_window_and_rotary(a, c, block);
  a.dropout = c.dropout;
  a.scale = mscale * mscale;
  a.init = weight_init();
  a.projection_init = residual_init(c.layers);
  return a;
}

nn::DeltaNetConfig delta_net_config(const LlamaConfig& c) {
  nn::DeltaNetConfig d;
  d.width = c.width;
  d.key_heads = c.linear_key_heads;
  d.value_heads = c.linear_value_heads ? c.linear_value_heads : c.linear_key_heads;
  d.key_width = c.linear_key_width ? c.linear_key_width : c.head_dim ? c.head_dim : c.width / c.heads;
  d.value_width = c.linear_value_width ? c.linear_value_width : d.key_width;
  d.taps = c.linear_taps;
  d.norm_eps = c.norm_eps;
  d.dropout = c.dropout;
  d.init = weight_init();
  d.projection_init = residual_init(c.layers);
  return d;
}

nn::MlpConfig mlp_config(const LlamaConfig& c) {
  nn::MlpConfig m;
  m.width = c.width;
  m.hidden = c.mlp_width ? c.mlp_width : (8 * c.width / 3 + 63) / 64 * 64;
  m.bias = false;
  m.dropout = c.dropout;
  m.gate = c.gelu_gate ? nn::Gate::gelu : nn::Gate::silu;
  m.init = weight_init();
  m.projection_init = residual_init(c.layers);
  return m;
}

nn::MixtureConfig mixture_config(const LlamaConfig& c) {
  const nn::MlpConfig m = mlp_config(c);
  nn::MixtureConfig e;
  e.width = c.width;
  e.hidden = c.expert_hidden ? c.expert_hidden : m.hidden;
  e.experts = c.experts;
  e.choices = c.experts_per_token;
  e.affinity = c.expert_affinity;
  e.normalize = c.normalize_experts;
  e.scale = c.expert_scale;
  e.choice_bias = c.expert_bias;
  e.balance_rate = c.expert_balance_rate;
  e.parts = c.expert_parts;
  e.allowed_parts = c.expert_parts_per_token;
  e.shared_hidden = c.shared_experts * e.hidden;
  e.shared_gate = c.shared_expert_gate;
  e.linear_bias = c.expert_linear_bias;
  e.gate_limit = c.expert_gate_limit;
  e.gate_alpha = c.expert_gate_alpha;
  e.capacity_factor = c.capacity_factor;
  e.groups = c.expert_groups;
  e.balances = c.aux_loss != 0;
  e.dropout = c.dropout;
  e.init = m.init;
  e.projection_init = m.projection_init;
  return e;
}

LlamaConfig llama3(int64_t layers, int64_t heads, int64_t width, int64_t mlp_width, bool tie_embeddings) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = 8;
  c.width = width;
  c.mlp_width = mlp_width;
  c.context = 8192;
  c.vocab = 128256;
  c.rope_theta = 500000.0;
  c.tie_embeddings = tie_embeddings;
  return c;
}

// Llama 3.1 was trained on for sequences 16 times as long.
LlamaConfig at_long_context(LlamaConfig c, double factor) {
  c.context = 131072;
  c.rope_scaling = RotaryScaling::llama3(factor);
  return c;
}

LlamaConfig qwen3(int64_t layers, int64_t heads, int64_t width, int64_t mlp_width, bool tie_embeddings) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = 8;
  c.width = width;
  c.head_dim = 128;
  c.mlp_width = mlp_width;
  c.context = 40960;
  c.vocab = 151936;
  c.rope_theta = 1e6;
  c.norm_eps = 1e-6;
  c.tie_embeddings = tie_embeddings;
  c.qk_norm = true;
  return c;
}

// Qwen3 30B-A3B, of which a token goes through 3B parameters (https://arxiv.org/abs/2505.09388).
LlamaConfig qwen3_30b_a3b() {
  LlamaConfig c = qwen3(48, 32, 2048, 6144, false);
  c.kv_heads = 4;
  c.experts = 128;
  c.experts_per_token = 8;
  c.expert_hidden = 768;
  c.aux_loss = 0.001;
  return c;
}

// Qwen3-Next 80B-A3B, of whose parameters a token goes through 3B, with linear attention in three of four blocks
// (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, whose config.json this is).
LlamaConfig qwen3_next() {
  LlamaConfig c = qwen3(48, 16, 2048, 5120, false);
  c.kv_heads = 2;
  c.head_dim = 256;
  c.context = 262144;
  c.rope_theta = 1e7;
  c.rotary_width = 64;
  c.attention_gate = true;
  c.full_attention_every = 4;
  c.linear_key_heads = 16;
  c.linear_value_heads = 32;
  c.linear_key_width = c.linear_value_width = 128;
  c.experts = 512;
  c.experts_per_token = 10;
  c.expert_hidden = 512;
  c.shared_experts = 1;
  c.shared_expert_gate = true;
  c.aux_loss = 0.001;
  return c;
}

// DeepSeek's: latents for attention, a first few dense blocks, then mixtures with shared experts.
LlamaConfig deepseek(int64_t layers, int64_t heads, int64_t width, int64_t mlp_width, int64_t experts, int64_t expert_hidden) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = 0;
  c.width = width;
  c.mlp_width = mlp_width;
  c.norm_eps = 1e-6;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.v_head_dim = 128;
  c.experts = experts;
  c.expert_hidden = expert_hidden;
  return c;
}

// DeepSeek-V2-Lite, 16B parameters of which a token goes through 2.4B (https://arxiv.org/abs/2405.04434, appendix B).
LlamaConfig deepseek_v2_lite() {
  LlamaConfig c = deepseek(27, 16, 2048, 10944, 64, 1408);
  c.context = 163840;
  c.vocab = 102400;
  c.rope_scaling = RotaryScaling::yarn(40, 4096, 1, 32);
  c.rope_scaling.amplitude = 1;
  c.mscale_all_dim = 0.707;
  c.experts_per_token = 6;
  c.normalize_experts = false;
  c.shared_experts = 2;
  c.dense_layers = 1;
  c.aux_loss = 0.001;
  return c;
}

// What DeepSeek-V3 and Moonlight have in common: sigmoid affinities, balance by a bias.
LlamaConfig with_biased_experts(LlamaConfig c, int64_t per_token, double scale, int64_t shared, int64_t dense) {
  c.experts_per_token = per_token;
  c.expert_affinity = nn::Affinity::sigmoid;
  c.expert_bias = true;
  c.expert_scale = scale;
  c.shared_experts = shared;
  c.dense_layers = dense;
  return c;
}

// DeepSeek-V3 and R1, 671B parameters of which a token goes through 37B (https://arxiv.org/abs/2412.19437, section 4.2).
LlamaConfig deepseek_v3() {
  LlamaConfig c = with_biased_experts(deepseek(61, 128, 7168, 18432, 256, 2048), 8, 2.5, 1, 3);
  c.context = 163840;
  c.vocab = 129280;
  c.q_lora_rank = 1536;
  c.rope_scaling = RotaryScaling::yarn(40, 4096, 1, 32);
  c.rope_scaling.amplitude = 1;
  c.mscale_all_dim = 1;
  c.expert_parts = 8;
  c.expert_parts_per_token = 4;
  return c;
}

// Moonlight 16B-A3B (https://arxiv.org/abs/2502.16982), whose config.json this is.
LlamaConfig moonlight() {
  LlamaConfig c = with_biased_experts(deepseek(27, 16, 2048, 11264, 64, 1408), 6, 2.446, 2, 1);
  c.context = 8192;
  c.vocab = 163840;
  c.rope_theta = 50000.0;
  c.norm_eps = 1e-5;
  return c;
}

// Gemma's (https://arxiv.org/abs/2403.08295), whose heads are wide, and whose keys are few.
LlamaConfig gemma(int64_t layers, int64_t heads, int64_t kv_heads, int64_t width, int64_t mlp_width) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.width = width;
  c.head_dim = 256;
  c.mlp_width = mlp_width;
  c.context = 8192;
  c.vocab = 256000;
  c.norm_eps = 1e-6;
  c.tie_embeddings = true;
  c.gelu_gate = true;
  c.scale_embedding = true;
  return c;
}

// Those of Gemma 3 (https://arxiv.org/abs/2503.19786) that read text alone: each sixth block sees all tokens.
LlamaConfig gemma3(int64_t layers, int64_t width, int64_t mlp_width) {
  LlamaConfig c = gemma(layers, 4, 1, width, mlp_width);
  c.context = 32768;
  c.vocab = 262144;
  c.rope_theta = 1e6;
  c.qk_norm = true;
  c.post_norms = true;
  c.window = 512;
  c.window_rope_theta = 10000.0;
  c.full_attention_every = 6;
  return c;
}

// gpt-oss 20B and 120B, of whose parameters a token goes through 3.6B and 5.1B (https://arxiv.org/abs/2508.10925).
LlamaConfig gpt_oss(int64_t layers, int64_t experts) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = 64;
  c.kv_heads = 8;
  c.width = 2880;
  c.head_dim = 64;
  c.mlp_width = 2880;
  c.context = 131072;
  c.vocab = 201088;
  c.rope_theta = 150000.0;
  c.rope_scaling = RotaryScaling::yarn(32, 4096, 1, 32, /*truncate=*/false);
  c.qkv_bias = c.out_bias = c.attention_sinks = true;
  c.window = 128;
  c.full_attention_every = 2;
  c.experts = experts;
  c.experts_per_token = 4;
  c.expert_linear_bias = true;
  c.expert_gate_limit = 7.0;
  return c;
}

// Mixtral 8x7B (Jiang et al., https://arxiv.org/abs/2401.04088).
LlamaConfig mixtral() {
  LlamaConfig c;
  c.layers = 32;
  c.heads = 32;
  c.kv_heads = 8;
  c.width = 4096;
  c.mlp_width = 14336;
  c.context = 32768;
  c.vocab = 32000;
  c.rope_theta = 1e6;
  c.experts = 8;
  c.aux_loss = 0.02;
  return c;
}

}  // namespace

LlamaConfig LlamaConfig::llama3_8b() { return preset("llama3-8b"); }

// The released models' configurations; Llama 3.3 70B has that of 3.1.
std::vector<std::pair<std::string, LlamaConfig>> LlamaConfig::published() {
  const LlamaConfig b1 = llama3(16, 32, 2048, 8192, true), b3 = llama3(28, 24, 3072, 8192, true),
                    b8 = llama3(32, 32, 4096, 14336, false), b70 = llama3(80, 64, 8192, 28672, false),
                    b405 = llama3(126, 128, 16384, 53248, false);
  return {{"llama3-8b", b8},
          {"llama3-70b", b70},
          {"llama3.1-8b", at_long_context(b8, 8)},
          {"llama3.1-70b", at_long_context(b70, 8)},
          {"llama3.1-405b", at_long_context(b405, 8)},
          {"llama3.2-1b", at_long_context(b1, 32)},
          {"llama3.2-3b", at_long_context(b3, 32)},
          {"qwen3-0.6b", qwen3(28, 16, 1024, 3072, true)},
          {"qwen3-1.7b", qwen3(28, 16, 2048, 6144, true)},
          {"qwen3-4b", qwen3(36, 32, 2560, 9728, true)},
          {"qwen3-8b", qwen3(36, 32, 4096, 12288, false)},
          {"qwen3-14b", qwen3(40, 40, 5120, 17408, false)},
          {"qwen3-32b", qwen3(64, 64, 5120, 25600, false)},
          {"qwen3-30b-a3b", qwen3_30b_a3b()},
          {"qwen3-next-80b-a3b", qwen3_next()},
          {"gemma-2b", gemma(18, 8, 1, 2048, 16384)},
          {"gemma-7b", gemma(28, 16, 16, 3072, 24576)},
          {"gemma3-270m", gemma3(18, 640, 2048)},
          {"gemma3-1b", gemma3(26, 1152, 6912)},
          {"mixtral-8x7b", mixtral()},
          {"gpt-oss-20b", gpt_oss(24, 32)},
          {"gpt-oss-120b", gpt_oss(36, 128)},
          {"deepseek-v2-lite", deepseek_v2_lite()},
          {"deepseek-v3", deepseek_v3()},
          {"moonlight-16b-a3b", moonlight()}};
}

LlamaConfig LlamaConfig::preset(const std::string& name) {
  if (name == "llama-tiny") return tiny();
  std::string known;
  for (const auto& [key, config] : published()) {
    if (key == name) return config;
    known += key + ", ";
  }
  fail<ConfigError>("[llama] no preset '", name, "'; there are ", known, "llama-tiny");
}

LlamaBlock::LlamaBlock(const LlamaConfig& c, int64_t index)
    : attention_norm(c.width, c.norm_eps), mlp_norm(c.width, c.norm_eps) {
  if (c.linear_key_heads && index < c.layers && is_linear(index, c.full_attention_every)) linear_attention.emplace(delta_net_config(c));
  else if (c.kv_lora_rank) latent_attention.emplace(latent_attention_config(c, index));
  else attention.emplace(attention_config(c, index));
  if (c.experts && index >= c.dense_layers) moe.emplace(mixture_config(c));
  else mlp.emplace(mlp_config(c));
  if (!c.post_norms) return;
  attention_post_norm.emplace(c.width, c.norm_eps);
  mlp_post_norm.emplace(c.width, c.norm_eps);
}

nn::Residual LlamaBlock::forward(nn::Residual stream, nn::KeyValueCache* cache) {
  const Tensor begins_BT = stream.begins;
  NormedSum x_BTC = attention_norm(std::move(stream));
  const auto attend = [&](auto& layer) { return layer(x_BTC.normed, cache, begins_BT); };
  Tensor branch_BTC = linear_attention ? attend(*linear_attention) : latent_attention ? attend(*latent_attention) : attend(*attention);
  if (attention_post_norm) branch_BTC = (*attention_post_norm)(branch_BTC);
  x_BTC = mlp_norm(nn::Residual{x_BTC.sum, std::move(branch_BTC)});
  branch_BTC = moe ? (*moe)(x_BTC.normed, /*drops=*/cache == nullptr) : (*mlp)(x_BTC.normed);
  if (mlp_post_norm) branch_BTC = (*mlp_post_norm)(branch_BTC);
  return {x_BTC.sum, branch_BTC, begins_BT};
}

LlamaMtpLayer::LlamaMtpLayer(const LlamaConfig& c, int64_t index)
    : LlamaBlock(c, index),
      token_norm(c.width, c.norm_eps),
      hidden_norm(c.width, c.norm_eps),
      join(2 * c.width, c.width, {.bias = false, .init = weight_init()}),
      norm(c.width, c.norm_eps) {}

Tensor LlamaMtpLayer::forward(nn::Residual stream, const Tensor& next_BTC, nn::KeyValueCache* cache) {
  stream.x = join(concat({token_norm(next_BTC), hidden_norm(stream.x)}, -1));
  return norm(LlamaBlock::forward(std::move(stream), cache)).normed;
}

Llama::Llama(const LlamaConfig& c)
    : Decoder({.type = "llama", .layers = c.layers, .width = c.width, .vocab = c.vocab, .context = c.context,
               .end_of_text = c.end_of_text, .tied = c.tie_embeddings, .mtp_layers = c.mtp_layers, .mtp_loss = c.mtp_loss}),
      config(c),
      embedding(token_table(c.vocab, c.width)),
      norm(c.width, c.norm_eps) {
  check<ConfigError>(c.experts == 0 || c.dense_layers < c.layers, "[llama] of ", c.layers, " blocks the first ", c.dense_layers,
                     " have no mixture: none has");
  check<ConfigError>(c.experts == 0 || !c.gelu_gate, "[llama] gelu_gate: mixtures of experts are SwiGLU");
  check<ConfigError>(c.kv_lora_rank == 0 || ((c.kv_heads == 0 || c.kv_heads == c.heads) && !c.qk_norm && !c.qkv_bias && !c.out_bias &&
                                             !c.attention_sinks && !c.attention_gate && !c.rotary_width),
                     "[llama] kv_lora_rank ", c.kv_lora_rank, ": latent attention has as many key heads as heads (kv_heads 0, not ",
                     c.kv_heads, "), and neither qk_norm, qkv_bias, out_bias, attention_sinks, attention_gate nor rotary_width");
  check<ConfigError>(c.linear_key_heads == 0 || c.window == 0, "[llama] linear_key_heads ", c.linear_key_heads, " with a window of ", c.window,
                     ": blocks without linear attention see all keys");
  blocks.reserve(static_cast<size_t>(c.layers));
  for (int64_t i = 0; i < c.layers; ++i) blocks.emplace_back(c, i);
  mtp_layers.reserve(static_cast<size_t>(c.mtp_layers));
  for (int64_t k = 0; k < c.mtp_layers; ++k) mtp_layers.emplace_back(c, c.layers + k);
}

void Llama::add_penalties(int64_t begin, int64_t end, Tensor& all) {
  for (int64_t i = begin; i < end; ++i) {
    LlamaBlock& one = block(i);
    if (!one.moe || !one.moe->imbalance) continue;
    const Tensor imbalance = nn::sum_over_stages(std::exchange(one.moe->imbalance, {}));
    all = all ? all + imbalance : imbalance;
  }
}

Tensor Llama::with_penalty(const Tensor& loss, const Tensor& penalty, int64_t targets, const CrossEntropyOptions& options) {
  const auto count = static_cast<double>(targets);
  if (options.divisor && options.divide_by == 0) return loss + penalty * (config.aux_loss * count) / options.divisor;
  return loss + penalty * (config.aux_loss * (options.divide_by > 0 ? count / options.divide_by : 1.0));
}

}  // namespace sheaf::models
