// Self-attention, causal or not, with one projection for queries, keys and values.
//
//   B batch   T tokens   C width   H query heads   G key and value heads   D width of a head
#pragma once

#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::nn {

struct AttentionConfig {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;     ///< key and value heads, a divisor of heads (grouped queries, https://arxiv.org/abs/2305.13245);
                            ///< 0: as many as heads
  int64_t head_dim = 0;     ///< 0: width / heads
  bool causal = true;       ///< a token sees itself and those before it; false: all, as in encoders, without window or cache
  bool bias = true;         ///< in both linear layers
  bool qkv_bias = false;    ///< in the first of them, if not in both
  bool out_bias = false;    ///< in the second
  bool gate = false;        ///< the heads' output is multiplied by the sigmoid of a linear layer of x (https://arxiv.org/abs/2505.06708)
  bool sinks = false;       ///< each head has a sink (AttentionOptions::sinks)
  bool qk_norm = false;     ///< each query and key is normalised, before it is rotated
  bool qk_norm_all_heads = false;  ///< all heads of a token are normalised as one row, not each separately
  double norm_eps = 1e-5;   ///< of these norms
  double dropout = 0.0;     ///< of the output (not of the attention weights, which never exist)
  double scale = 1.0;       ///< of scores, in addition to 1 / sqrt(head_dim)
  double softcap = 0.0;     ///< scores are softly limited to it (AttentionOptions::softcap); 0: none
  int64_t window = 0;       ///< keys that a token sees, itself and those before it (sliding-window attention); 0: all
  double rope_theta = 0.0;  ///< base of rotary positions; 0: none
  int64_t rotary_dim = 0;  ///< how many of each head's last elements are rotated; 0: all
  RotaryScaling rope_scaling = {};  ///< of their frequencies
  Init init = Init::normal(0.02);             ///< of the input projections
  Init projection_init = Init::normal(0.02);  ///< of the output projection
};

/// The number of units in which `ranks` ranks of a tensor axis share heads, a unit being a key head with the queries that read it:
/// equal to the key heads or, for more ranks, the fewest copies of each that give every rank one. The number of copies divides heads
/// / kv_heads (queries per key head) and head_dim (a key head is assembled from that many parts). If none suffices, the maximum.
int64_t head_units(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ranks);

/// sheaf::document_begins for SelfAttention: placed as tokens[B, T], but whole on every rank of axes that shard sequences,
/// because attention sees whole sequences there. Gathers four bytes per token.
Tensor document_begins(const Tensor& tokens_BT, int64_t end_of_text);

/// Multi-head attention of each token to itself and those before it (Vaswani et al., https://arxiv.org/abs/1706.03762): [B, T, C]
/// → [B, T, C]. With a cache, the T tokens follow those that it has read, and are appended to it. With `begins` (document_begins, or
/// where documents begin, cut like x), a token attends only to its own document; not with a cache, whose tokens are one document. With a
/// window it attends to itself and the window - 1 tokens before it, including those in the cache.
///
/// With AttentionConfig::causal = false each token attends to all of its sequence, as in encoders (Devlin et al.,
/// https://arxiv.org/abs/1810.04805), or of its document, on every mesh like causal attention. ConfigError for a window, and in the call
/// for a cache: these need a causal mask. Padding is hidden by making it a document of its own (AttentionOptions::begins).
struct SelfAttention : Module {
  AttentionConfig config;      ///< with kv_heads and head_dim
  Linear qkv;                  ///< rows of the weight: H·D of queries, G·D of keys, G·D of values
  std::optional<Linear> gate;  ///< to H·D
  Linear projection;           ///< from H·D
  Parameter sinks;             ///< [H]
  std::optional<RMSNorm> query_norm, key_norm;  ///< of a head each or, with qk_norm_all_heads, of all H·D and G·D
  Dropout dropout;
  ContextComm context_comm = ContextComm::all_to_all;  ///< if ranks share sequences (set by shard())

  explicit SelfAttention(const AttentionConfig& config);
  void take_settings(const Module& source) override { context_comm = static_cast<const SelfAttention&>(source).context_comm; }
  Tensor forward(const Tensor& x_BTC, KeyValueCache* cache = nullptr, const Tensor& begins_BT = {});
  /// Called before materialize(), by shard(): a tensor axis will shard the heads in this many head_units(). If there are more of
  /// these than key heads, key heads are split, too: ranks compute parts of them, gather all parts, and take the heads that their
  /// queries read.
  void cut_heads(int64_t units);
  SHEAF_FIELDS(qkv, gate, projection, sinks, query_norm, key_norm, dropout);

 private:
  AttentionOptions options(const Tensor& begins_BT) const;
  Tensor normed_over_heads(const Tensor& qkv_BTE) const;
  Tensor with_whole_keys(const Tensor& qkv_BTE, int64_t units) const;
  template <class WholeKeys>
  Tensor attend(const Tensor& qkv_BTE, int64_t keys, const Tensor& begins_BT, WholeKeys&& whole_keys) const;
};

}  // namespace sheaf::nn
