// The published sizes of models of Llama's kind.
#include "sheaf/models/llama.h"

namespace sheaf::models {
namespace {

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

// Llama 3.1 was trained further, on sequences 16 times as long.
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

// Qwen3 30B-A3B, with 3B parameters active per token (https://arxiv.org/abs/2505.09388).
LlamaConfig qwen3_30b_a3b() {
  LlamaConfig c = qwen3(48, 32, 2048, 6144, false);
  c.kv_heads = 4;
  c.experts = 128;
  c.experts_per_token = 8;
  c.expert_hidden = 768;
  c.aux_loss = 0.001;
  return c;
}

// Qwen3-Next 80B-A3B, with 3B parameters active per token, with linear attention in three of four blocks
// (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, whose config.json this is).
LlamaConfig qwen3_next() {
  LlamaConfig c = qwen3(48, 16, 2048, 5120, false);
  c.kv_heads = 2;
  c.head_dim = 256;
  c.context = 262144;
  c.rope_theta = 1e7;
  c.rotary_dim = 64;
  c.attention_gate = true;
  c.full_attention_every = 4;
  c.linear_key_heads = 16;
  c.linear_value_heads = 32;
  c.linear_key_head_dim = c.linear_value_head_dim = 128;
  c.experts = 512;
  c.experts_per_token = 10;
  c.expert_hidden = 512;
  c.shared_experts = 1;
  c.shared_expert_gate = true;
  c.aux_loss = 0.001;
  return c;
}

// Qwen3.5's, with the same layers: 9B, dense (https://huggingface.co/Qwen/Qwen3.5-9B), without its vision model.
LlamaConfig qwen3_5_9b() {
  LlamaConfig c = qwen3_next();
  c.layers = 32;
  c.width = 4096;
  c.kv_heads = 4;
  c.mlp_width = 12288;
  c.vocab = 248320;
  c.experts = c.shared_experts = 0;
  c.shared_expert_gate = false;
  c.aux_loss = 0;
  return c;
}

// And 35B-A3B, with mixtures (https://huggingface.co/Qwen/Qwen3.5-35B-A3B).
LlamaConfig qwen3_5_35b_a3b() {
  LlamaConfig c = qwen3_next();
  c.layers = 40;
  c.mlp_width = c.expert_hidden;
  c.vocab = 248320;
  c.experts = 256;
  c.experts_per_token = 8;
  return c;
}

// DeepSeek's: latent attention, a few dense blocks at first, then mixtures with shared experts.
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

// DeepSeek-V2-Lite, 16B parameters with 2.4B active per token (https://arxiv.org/abs/2405.04434, appendix B).
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

// Common to DeepSeek-V3 and Moonlight: sigmoid affinities, load balancing by a bias.
LlamaConfig with_biased_experts(LlamaConfig c, int64_t per_token, double scale, int64_t shared, int64_t dense) {
  c.experts_per_token = per_token;
  c.expert_affinity = nn::Affinity::sigmoid;
  c.expert_bias = true;
  c.expert_scale = scale;
  c.shared_experts = shared;
  c.dense_layers = dense;
  return c;
}

// DeepSeek-V3 and R1, 671B parameters with 37B active per token (https://arxiv.org/abs/2412.19437, section 4.2).
LlamaConfig deepseek_v3() {
  LlamaConfig c = with_biased_experts(deepseek(61, 128, 7168, 18432, 256, 2048), 8, 2.5, 1, 3);
  c.context = 163840;
  c.vocab = 129280;
  c.q_lora_rank = 1536;
  c.rope_scaling = RotaryScaling::yarn(40, 4096, 1, 32);
  c.rope_scaling.amplitude = 1;
  c.mscale_all_dim = 1;
  c.routing_groups = 8;
  c.routing_groups_per_token = 4;
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

// Kimi K2, 1 T parameters with 32B active per token (https://arxiv.org/abs/2507.20534).
LlamaConfig kimi_k2() {
  LlamaConfig c = with_biased_experts(deepseek(61, 64, 7168, 18432, 384, 2048), 8, 2.827, 1, 1);
  c.context = 131072;
  c.vocab = 163840;
  c.q_lora_rank = 1536;
  c.rope_theta = 50000.0;
  c.rope_scaling = RotaryScaling::yarn(32, 4096, 1, 1);
  c.rope_scaling.amplitude = 1;
  c.mscale_all_dim = 1;
  return c;
}

// GLM-4.5 and GLM-4.5-Air (https://arxiv.org/abs/2508.06471): DeepSeek-V3's mixtures, and attention with half of each head rotated.
LlamaConfig glm4_5(int64_t layers, int64_t width, int64_t mlp_width, int64_t experts, int64_t expert_hidden, double scale, int64_t dense) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = 96;
  c.kv_heads = 8;
  c.width = width;
  c.head_dim = 128;
  c.mlp_width = mlp_width;
  c.context = 131072;
  c.vocab = 151552;
  c.rope_theta = 1e6;
  c.qkv_bias = true;
  c.qk_norm = layers > 46;
  c.rotary_dim = 64;
  c.experts = experts;
  c.expert_hidden = expert_hidden;
  return with_biased_experts(c, 8, scale, 1, dense);
}

// Gemma's (https://arxiv.org/abs/2403.08295), with wide heads and few key heads.
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

// Gemma 2 (https://arxiv.org/abs/2408.00118): every second block sees all tokens; scores and logits are capped.
LlamaConfig gemma2(int64_t layers, int64_t heads, int64_t head_dim, int64_t width, int64_t mlp_width) {
  LlamaConfig c = gemma(layers, heads, heads / 2, width, mlp_width);
  c.head_dim = head_dim;
  c.post_norms = true;
  c.window = 4096;
  c.full_attention_every = 2;
  c.attn_logit_softcapping = 50.0;
  c.final_logit_softcapping = 30.0;
  if (head_dim != 256) c.query_pre_attn_scalar = width / heads;
  return c;
}

// SmolLM3 (https://huggingface.co/blog/smollm3): every fourth block has no positions (https://arxiv.org/abs/2501.18795).
LlamaConfig smollm3() {
  LlamaConfig c;
  c.layers = 36;
  c.heads = 16;
  c.kv_heads = 4;
  c.width = 2048;
  c.mlp_width = 11008;
  c.context = 65536;
  c.vocab = 128256;
  c.rope_theta = 5e6;
  c.norm_eps = 1e-6;
  c.tie_embeddings = true;
  c.nope_every = 4;
  return c;
}

// OLMo 2 (https://arxiv.org/abs/2501.00656) normalises the outputs of layers, not their inputs, and all of a token's heads together.
LlamaConfig olmo2(int64_t layers, int64_t heads, int64_t kv_heads, int64_t width, int64_t mlp_width) {
  LlamaConfig c;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.width = width;
  c.mlp_width = mlp_width;
  c.context = 4096;
  c.vocab = 100352;
  c.rope_theta = 500000.0;
  c.norm_eps = 1e-6;
  c.qk_norm = c.qk_norm_all_heads = true;
  c.pre_norms = false;
  c.post_norms = true;
  return c;
}

// OLMo 3 (https://arxiv.org/abs/2512.13961): every fourth block sees all tokens, and only its frequencies are scaled.
LlamaConfig olmo3(int64_t layers, int64_t heads, int64_t kv_heads, int64_t width, int64_t mlp_width) {
  LlamaConfig c = olmo2(layers, heads, kv_heads, width, mlp_width);
  c.context = 65536;
  c.vocab = 100278;
  c.rope_scaling = RotaryScaling::yarn(8, 8192);
  c.window = 4096;
  c.window_rope_theta = c.rope_theta;
  c.full_attention_every = 4;
  return c;
}

// OLMoE 1B-7B, with 1.3B parameters active per token (https://arxiv.org/abs/2409.02060).
LlamaConfig olmoe() {
  LlamaConfig c = olmo2(16, 16, 16, 2048, 1024);
  c.vocab = 50304;
  c.rope_theta = 10000.0;
  c.norm_eps = 1e-5;
  c.pre_norms = true;
  c.post_norms = false;
  c.experts = 64;
  c.experts_per_token = 8;
  c.normalize_experts = false;
  c.aux_loss = 0.01;
  c.router_z_loss = 0.001;
  return c;
}

// Phi-4 (https://arxiv.org/abs/2412.08905).
LlamaConfig phi4() {
  LlamaConfig c;
  c.layers = 40;
  c.heads = 40;
  c.kv_heads = 10;
  c.width = 5120;
  c.mlp_width = 17920;
  c.context = 16384;
  c.vocab = 100352;
  c.rope_theta = 250000.0;
  return c;
}

// The text-only ones of Gemma 3 (https://arxiv.org/abs/2503.19786): every sixth block sees all tokens.
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

// The larger ones, which also read images, without their image encoder.
LlamaConfig gemma3_of_images(int64_t layers, int64_t heads, int64_t head_dim, int64_t width, int64_t mlp_width) {
  LlamaConfig c = gemma3(layers, width, mlp_width);
  c.heads = heads;
  c.kv_heads = heads / 2;
  c.head_dim = head_dim;
  c.context = 131072;
  c.vocab = 262208;
  c.rope_scaling = RotaryScaling::linear(8);
  c.window = 1024;
  if (head_dim != 256) c.query_pre_attn_scalar = width / heads;
  return c;
}

// gpt-oss 20B and 120B, with 3.6B and 5.1B parameters active per token (https://arxiv.org/abs/2508.10925).
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
          {"qwen3.5-9b", qwen3_5_9b()},
          {"qwen3.5-35b-a3b", qwen3_5_35b_a3b()},
          {"gemma-2b", gemma(18, 8, 1, 2048, 16384)},
          {"gemma-7b", gemma(28, 16, 16, 3072, 24576)},
          {"gemma2-2b", gemma2(26, 8, 256, 2304, 9216)},
          {"gemma2-9b", gemma2(42, 16, 256, 3584, 14336)},
          {"gemma2-27b", gemma2(46, 32, 128, 4608, 36864)},
          {"gemma3-270m", gemma3(18, 640, 2048)},
          {"gemma3-1b", gemma3(26, 1152, 6912)},
          {"gemma3-4b", gemma3_of_images(34, 8, 256, 2560, 10240)},
          {"gemma3-12b", gemma3_of_images(48, 16, 256, 3840, 15360)},
          {"gemma3-27b", gemma3_of_images(62, 32, 128, 5376, 21504)},
          {"smollm3-3b", smollm3()},
          {"olmo2-1b", olmo2(16, 16, 16, 2048, 8192)},
          {"olmo2-7b", olmo2(32, 32, 32, 4096, 11008)},
          {"olmo2-13b", olmo2(40, 40, 40, 5120, 13824)},
          {"olmo2-32b", olmo2(64, 40, 8, 5120, 27648)},
          {"olmo3-7b", olmo3(32, 32, 32, 4096, 11008)},
          {"olmo3-32b", olmo3(64, 40, 8, 5120, 27648)},
          {"olmoe-1b-7b", olmoe()},
          {"phi4-14b", phi4()},
          {"mixtral-8x7b", mixtral()},
          {"gpt-oss-20b", gpt_oss(24, 32)},
          {"gpt-oss-120b", gpt_oss(36, 128)},
          {"deepseek-v2-lite", deepseek_v2_lite()},
          {"deepseek-v3", deepseek_v3()},
          {"moonlight-16b-a3b", moonlight()},
          {"kimi-k2", kimi_k2()},
          {"glm-4.5", glm4_5(92, 5120, 12288, 160, 1536, 2.5, 3)},
          {"glm-4.5-air", glm4_5(46, 4096, 10944, 128, 1408, 1.0, 1)}};
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

}  // namespace sheaf::models
