// Llama (Touvron et al., https://arxiv.org/abs/2302.13971; Llama 3: https://arxiv.org/abs/2407.21783): RMS norms, rotary positions,
// grouped-query attention, SwiGLU, no biases, a separate head.
//
//   B batch   T tokens   C width   V vocabulary
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/models/decoder.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/layers/delta_net.h"
#include "sheaf/nn/layers/experts.h"
#include "sheaf/nn/layers/latent_attention.h"
#include "sheaf/nn/layers/mlp.h"

namespace sheaf::models {

struct LlamaConfig {
  int64_t layers = 2;     ///< blocks
  int64_t heads = 4;      ///< query heads
  int64_t kv_heads = 2;   ///< key and value heads; 0: as many as heads
  int64_t width = 64;     ///< of the residual stream
  int64_t head_dim = 0;   ///< width of a head; 0: width / heads
  int64_t mlp_width = 0;  ///< 0: 8/3 · width, up to a multiple of 64
  int64_t context = 64;   ///< longest sequence
  int64_t vocab = 256;
  double rope_theta = 10000.0;      ///< base of the rotary frequencies
  RotaryScaling rope_scaling = {};  ///< of these frequencies, such as RotaryScaling::llama3(8)
  double norm_eps = 1e-5;
  double dropout = 0.0;               ///< of attention and MLP outputs
  bool tie_embeddings = false;        ///< the head is the token embedding
  bool qkv_bias = false;              ///< queries, keys and values have biases, as Qwen2's
  bool out_bias = false;              ///< attention's output layer has a bias, as gpt-oss's
  bool attention_gate = false;        ///< the heads' output is gated, as Qwen3-Next's (AttentionConfig::gate)
  int64_t rotary_dim = 0;             ///< how many of a head's last elements are rotated; 0: all
  int64_t query_pre_attn_scalar = 0;  ///< scores are divided by its root, as in Gemma 3 27B; 0: by that of the head's width
  bool attention_sinks = false;       ///< each head's softmax has a sink, as gpt-oss's (AttentionConfig::sinks)
  bool qk_norm = false;               ///< queries and keys are normalised before they are rotated, as Qwen3's
  bool qk_norm_all_heads = false;     ///< in that case, all heads together, as OLMo 2's (AttentionConfig::qk_norm_all_heads)
  bool gelu_gate = false;             ///< MLPs are GeGLU, as Gemma's; not with experts, whose mixtures are SwiGLU
  bool pre_norms = true;              ///< the inputs of attention and MLPs are normalised
  bool post_norms = false;            ///< their outputs are, before they are added: in addition, as Gemma 3's, or only they, as OLMo 2's
  bool scale_embedding = false;       ///< the embedding of a token is multiplied by sqrt(width), as Gemma's

  int64_t experts = 0;  ///< of a mixture replacing each MLP; 0: none
  int64_t experts_per_token = 2;
  int64_t expert_hidden = 0;      ///< hidden width of an expert; 0: that of the MLP
  double capacity_factor = 0.0;   ///< of places for an expert's tokens (MixtureConfig::capacity_factor); 0: one for each
  int64_t capacity_groups = 1;    ///< of tokens, whose places are counted separately
  bool normalize_experts = true;  ///< the weights of a token's experts sum to 1
  nn::Affinity expert_affinity = nn::Affinity::softmax;  ///< how experts are chosen and weighted
  bool expert_bias = false;         ///< experts have biases for their choice (MixtureConfig::choice_bias)
  double expert_balance_rate = 1e-3;  ///< how far a step moves such a bias
  double expert_scale = 1.0;        ///< factor of the experts' weights
  bool expert_linear_bias = false;  ///< routers and the layers of experts have biases, as gpt-oss's
  double expert_gate_limit = 0.0;   ///< gates are gpt-oss's, clamped to this; 0: SwiGLU's
  double expert_gate_alpha = 1.702;  ///< factor within their sigmoid
  int64_t routing_groups = 1, routing_groups_per_token = 1;  ///< equal groups of experts, and how many of them a token chooses from
  int64_t shared_experts = 0;       ///< MLPs of expert_hidden, in parallel, that every token passes through
  bool shared_expert_gate = false;  ///< their output is multiplied by one number per token, as Qwen2-MoE's (MixtureConfig::shared_gate)
  int64_t dense_layers = 0;         ///< this many first blocks have an MLP, not a mixture
  double aux_loss = 0.0;          ///< factor of each mixture's imbalance in the training loss
  double router_z_loss = 0.0;     ///< and of its MixtureOfExperts::router_z

  int64_t mtp_layers = 0;  ///< layers that predict further tokens, see Decoder::Sizes
  double mtp_loss = 0.3;   ///< factor of their losses' mean in the training loss

  int64_t kv_lora_rank = 0;       ///< attention is nn::LatentAttention with this width of its latent; 0: it is not
  int64_t q_lora_rank = 0;        ///< width of the latent of queries; 0: they have none
  int64_t qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;  ///< of a head: key elements without rotation, key elements with
                                                                       ///< rotation, value elements; 0: width / heads, half of that, the
                                                                       ///< first
  double mscale_all_dim = 0.0;    ///< in latent attention with YaRN: scores are multiplied by yarn_amplitude(factor, this)²

  int64_t linear_key_heads = 0;   ///< nn::GatedDeltaNet instead of attention, except in each full_attention_every-th block; 0: nowhere
  int64_t linear_value_heads = 0;  ///< of linear attention; 0: as many as its key heads
  int64_t linear_key_head_dim = 0, linear_value_head_dim = 0;  ///< widths of its heads; 0: that of attention's, that of its keys
  int64_t linear_conv_kernel = 4;  ///< taps of its convolutions

  int64_t window = 0;                    ///< as in GptConfig
  double window_rope_theta = 0.0;        ///< base of the rotary frequencies of blocks with a window, which are not scaled; 0: the others'
                                   ///< frequencies
  double attn_logit_softcapping = 0.0;   ///< scores of attention are softly limited to it (AttentionConfig::softcap), as Gemma 2's; 0: none
  double final_logit_softcapping = 0.0;  ///< the same for logits (CrossEntropyOptions::softcap)
  int64_t full_attention_every = 0;      ///< as in GptConfig
  int64_t nope_every = 0;                ///< attention of blocks N, 2 N, .., counted from 1, has no rotary positions; 0: all have them
  int64_t end_of_text = -1;              ///< as in GptConfig

  static LlamaConfig tiny() { return {}; }
  /// The published sizes by name, "llama3-8b": those of Llama 3 at its context of 8,192, then those of Llama 3.1 and 3.2
  /// at theirs of 131,072, whose rotary positions are scaled; then other models' (llama_presets.cc).
  static std::vector<std::pair<std::string, LlamaConfig>> published();
  /// One of them, or "llama-tiny"; throws ConfigError that lists them.
  static LlamaConfig preset(const std::string& name);
};

/// x + attention(norm(x)), then x + mlp(norm(x)), whose addition is done by the next norm. Attention is one of three kinds, the MLP
/// may be a mixture, and the output of either may be normalised, in addition to or instead of its input.
struct LlamaBlock : DecoderBlock {
  std::optional<nn::RMSNorm> attention_norm;
  std::optional<nn::SelfAttention> attention;
  std::optional<nn::LatentAttention> latent_attention;
  std::optional<nn::GatedDeltaNet> linear_attention;
  std::optional<nn::RMSNorm> attention_post_norm;
  std::optional<nn::RMSNorm> mlp_norm;
  std::optional<nn::GatedMLP> mlp;
  std::optional<nn::MixtureOfExperts> moe;
  std::optional<nn::RMSNorm> mlp_post_norm;

  explicit LlamaBlock(const LlamaConfig& config, int64_t index = 0);  ///< its number in the model, from 0, decides which keys it sees
  nn::Residual forward(nn::Residual stream, nn::KeyValueCache* cache = nullptr) override;
  SHEAF_FIELDS(attention_norm, attention, latent_attention, linear_attention, attention_post_norm, mlp_norm, mlp, moe, mlp_post_norm);
};

/// The head's last input and the tokens that were predicted from it, concatenated, through a linear layer and a block (MTP; as in
/// DeepSeek-V3's checkpoints: both are normalised before, and the result is for the head).
struct LlamaMtpLayer : LlamaBlock {
  nn::RMSNorm token_norm, hidden_norm;
  nn::Linear join;
  nn::RMSNorm norm;

  LlamaMtpLayer(const LlamaConfig& config, int64_t index);
  Tensor forward(nn::Residual stream, const Tensor& next_BTC, nn::KeyValueCache* cache = nullptr);
  SHEAF_FIELDS(token_norm, hidden_norm, join, attention_norm, attention, latent_attention, linear_attention, attention_post_norm, mlp_norm,
               mlp, moe, mlp_post_norm, norm);
};

/// In training, aux_loss times the sum of all mixtures' imbalances and router_z_loss times the sum of their router_z are added to the
/// loss: those of each micro-batch, weighted by its fraction of the loss's divisor.
struct Llama : Decoder {
  LlamaConfig config;  ///< what it was created from
  nn::Embedding embedding;
  std::vector<LlamaBlock> blocks;
  nn::RMSNorm norm;
  std::vector<LlamaMtpLayer> mtp_layers;

  explicit Llama(const LlamaConfig& config);
  SHEAF_FIELDS(embedding, blocks, norm, mtp_layers, head);

 private:
  nn::Embedding& table() override { return embedding; }
  LlamaBlock& block(int64_t i) override {
    return i < config.layers ? blocks[static_cast<size_t>(i)] : mtp_layers[static_cast<size_t>(i - config.layers)];
  }
  nn::Residual embedded(const Tensor& tokens_BT, int64_t /*position*/, const Tensor& /*begins_BT*/) override {
    const Tensor x_BTC = embedding(tokens_BT);
    return {.x = config.scale_embedding ? x_BTC * std::sqrt(static_cast<double>(config.width)) : x_BTC};
  }
  Tensor normed(nn::Residual stream) override { return norm(std::move(stream)).normed; }
  Tensor mtp(int64_t k, nn::Residual stream, const Tensor& next_BTC, nn::KeyValueCache* cache) override {
    return mtp_layers[static_cast<size_t>(k)](std::move(stream), next_BTC, cache);
  }
  void add_penalties(int64_t begin, int64_t end, Tensor& all) override;
  Tensor with_penalty(const Tensor& loss, const Tensor& penalty, int64_t targets, const CrossEntropyOptions& options) override;
};

}  // namespace sheaf::models
