// Cross-attention: tokens attend to those of another sequence, such as a decoder's to an encoder's, or an image's to a text's.
//
//   B batch   T tokens   C their width   S tokens of the memory   M its width   H query heads   G key and value heads   D width of a head
#pragma once

#include <optional>

#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::nn {

struct CrossAttentionConfig {
  int64_t width = 0;         ///< of the tokens, and of the result
  int64_t memory_width = 0;  ///< of what they attend to; 0: as the tokens
  int64_t heads = 0;
  int64_t kv_heads = 0;     ///< key and value heads, a divisor of heads (grouped queries, https://arxiv.org/abs/2305.13245); 0: as many
  int64_t head_dim = 0;     ///< 0: width / heads
  bool bias = true;         ///< in all linear layers
  bool qk_norm = false;     ///< each query and key is normalised
  double norm_eps = 1e-5;   ///< of these norms
  double dropout = 0.0;     ///< of the output
  double scale = 1.0;       ///< of scores, in addition to 1 / sqrt(head_dim)
  Init init = Init::normal(0.02);             ///< of the input projections
  Init projection_init = Init::normal(0.02);  ///< of the output projection
};

/// Multi-head attention of each token to all of a memory (Vaswani et al., https://arxiv.org/abs/1706.03762, section 3.2.3): x[B, T, C],
/// memory[B, S, M] → [B, T, C]. With `key_begins` the memory consists of documents, padding among them, and of `begins` each token has
/// the first key of its document (AttentionOptions); the first of them by default.
///
/// On every mesh: ranks of a tensor axis share heads, of which each key head with its queries is on one rank. Ranks of a context axis
/// have their own tokens of both sequences: keys and values are gathered, and again in the backward. x, memory and where documents
/// begin are sharded alike.
struct CrossAttention : Module {
  int64_t heads, kv_heads, head_dim;
  double scale;        ///< of scores, including 1 / sqrt(head_dim)
  Linear query;        ///< to H·D
  Linear keys_values;  ///< of the memory: rows of the weight are G·D of keys, G·D of values
  Linear projection;   ///< from H·D
  std::optional<RMSNorm> query_norm, key_norm;
  Dropout dropout;

  explicit CrossAttention(CrossAttentionConfig config);
  Tensor forward(const Tensor& x_BTC, const Tensor& memory_BSM, const Tensor& key_begins_BS = {}, const Tensor& begins_BT = {});
  SHEAF_FIELDS(query, keys_values, projection, query_norm, key_norm, dropout);
};

}  // namespace sheaf::nn
