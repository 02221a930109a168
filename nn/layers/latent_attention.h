// Multi-head latent attention (DeepSeek-AI, https://arxiv.org/abs/2405.04434, section 2.1): keys and values of all heads are computed
// from one narrow latent, queries from another.
//
//   B batch   T tokens   C width   H heads   N, R, E elements of a head: of keys its own, of keys shared, of values
#pragma once

#include <optional>

#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::nn {

struct LatentAttentionConfig {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t q_lora_rank = 0;                    ///< width of the queries' latent; 0: they are computed from x
  int64_t kv_lora_rank = 0;                   ///< width of the latent of keys and values
  int64_t qk_nope_head_dim = 0;               ///< N: elements of a query and a key that are not rotated
  int64_t qk_rope_head_dim = 0;               ///< R: the rotated elements after those; all heads of a token's key share them
  int64_t v_head_dim = 0;                     ///< E
  double norm_eps = 1e-6;                     ///< of the latents' norms
  double dropout = 0.0;                       ///< of the output
  int64_t window = 0;                         ///< as in AttentionConfig
  double rope_theta = 10000.0;                ///< base of rotary positions
  RotaryScaling rope_scaling = {};            ///< of their frequencies
  double scale = 1.0;                         ///< of scores, in addition to 1 / sqrt(N + R)
  Init init = Init::normal(0.02);             ///< of all but the output projection
  Init projection_init = Init::normal(0.02);  ///< of the output projection
};

/// Causal self-attention like SelfAttention: [B, T, C] → [B, T, C], with a cache, documents and a window as there. A cache
/// keeps whole keys and values. Ranks of a tensor axis share heads; if it shards tokens, the latents are gathered, which are narrower
/// than x. A context axis gathers them, too, with ContextComm::all_gather; with all_to_all its ranks share heads. Rotary pairs are
/// neighbouring elements, as in DeepSeek's checkpoints.
struct LatentAttention : Module {
  LatentAttentionConfig config;
  Linear latents;                     ///< rows of the weight: the queries' latent if there is one, that of keys and values, R of the shared key
  std::optional<RMSNorm> query_norm;  ///< of the queries' latent
  RMSNorm latent_norm;                ///< of that of keys and values
  Linear queries;                     ///< to H (N + R), from their latent or from x
  Linear keys_values;                 ///< to H (N + E): for each head N of its keys, E of its values
  Linear projection;                  ///< from H·E
  Dropout dropout;
  ContextComm context_comm = ContextComm::all_to_all;  ///< if ranks share sequences (set by shard())

  explicit LatentAttention(const LatentAttentionConfig& config);
  void take_settings(const Module& source) override { context_comm = static_cast<const LatentAttention&>(source).context_comm; }
  Tensor forward(const Tensor& x_BTC, KeyValueCache* cache = nullptr, const Tensor& begins_BT = {});
  SHEAF_FIELDS(latents, query_norm, latent_norm, queries, keys_values, projection, dropout);

 private:
  Tensor rotated(const Tensor& x_BTE, int64_t heads, KeyValueCache* cache) const;
  Tensor attend_to_cache(const Tensor& q_BTD, const Tensor& up_BTE, const Tensor& shared_BTR, const AttentionOptions& options,
                         KeyValueCache& cache) const;
};

}  // namespace sheaf::nn
