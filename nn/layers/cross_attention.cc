#include "sheaf/nn/layers/cross_attention.h"

#include <vector>

#include "sheaf/autograd/recording.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::nn {
namespace {

// Checks c and fills in what is 0.
const CrossAttentionConfig& complete(CrossAttentionConfig& c) {
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  if (c.memory_width == 0) c.memory_width = c.width;
  check<ConfigError>(c.width > 0 && c.memory_width > 0 && c.heads > 0 && (c.head_dim > 0 || (c.head_dim == 0 && c.width % c.heads == 0)),
                     "[cross_attention] width ", c.width, " is not a multiple of ", c.heads, " heads, or memory_width ", c.memory_width,
                     " is not positive");
  check<ConfigError>(c.kv_heads > 0 && c.heads % c.kv_heads == 0, "[cross_attention] ", c.heads, " heads are not a multiple of ",
                     c.kv_heads, " key and value heads");
  if (c.head_dim == 0) c.head_dim = c.width / c.heads;
  return c;
}

// A key head and the queries that read it are a unit, of which ranks of a tensor axis have their own.
OwnershipMap cut_of_queries(int dim, const CrossAttentionConfig& c) { return OwnershipMap::even(dim, c.heads / c.kv_heads * c.head_dim); }
OwnershipMap cut_of_keys(const CrossAttentionConfig& c) {
  return OwnershipMap::parts(0, {c.kv_heads * c.head_dim, c.kv_heads * c.head_dim}, c.kv_heads);
}

}  // namespace

CrossAttention::CrossAttention(CrossAttentionConfig config)
    : heads(complete(config).heads),
      kv_heads(config.kv_heads),
      head_dim(config.head_dim),
      scale(config.scale / std::sqrt(static_cast<double>(head_dim))),
      query(config.width, heads * head_dim, {config.bias, config.init, cut_of_queries(0, config)}),
      keys_values(config.memory_width, 2 * kv_heads * head_dim, {config.bias, config.init, cut_of_keys(config)}),
      projection(heads * head_dim, config.width, {config.bias, config.projection_init, cut_of_queries(1, config)}),
      dropout(config.dropout) {
  if (!config.qk_norm) return;
  query_norm.emplace(head_dim, config.norm_eps);
  key_norm.emplace(head_dim, config.norm_eps);
}

Tensor CrossAttention::forward(const Tensor& x_BTC, const Tensor& memory_BSM, const Tensor& key_begins_BS, const Tensor& begins_BT) {
  check<ConfigError>(!begins_BT || key_begins_BS, "[cross_attention] '", path_label(path()), "': the documents of tokens are those of the ",
                     "memory, so begins want key_begins");
  const int64_t b = x_BTC.size(0), t = x_BTC.size(1), s = memory_BSM.size(1);
  const TensorRegion region(x_BTC, query.weight);
  Tensor q_BTHD = reshape(query(region.enter(x_BTC, query.fp8 == Fp8::none)), {b, t, heads, head_dim});
  if (query_norm) q_BTHD = (*query_norm)(q_BTHD);
  const Tensor kv_BSE = keys_values(region.enter(memory_BSM, keys_values.fp8 == Fp8::none));
  Tensor kv_BSGD = reshape(kv_BSE, {memory_BSM.size(0), s, 2 * kv_heads, head_dim});
  if (key_norm) {
    const std::vector<Tensor> parts = chunk(kv_BSGD, 2, 2);
    kv_BSGD = concat_as({(*key_norm)(parts[0]), parts[1]}, 2, kv_BSGD.type());
  }
  std::vector<Tensor> of_all;  // keys, values
  {
    const RecomputeScope again({.results = true});  // the backward keeps this rank's keys and values, not the gathered ones
    of_all = chunk(whole_keys_values(kv_BSGD, heads / kv_heads), 2, 2);
  }
  AttentionOptions options{.causal = false, .scale = scale};
  options.key_begins = region.enter_begins(key_begins_BS);
  if (begins_BT) options.begins = region.enter(begins_BT, /*in_pieces=*/false);
  const Tensor mixed_BTHD = attention(q_BTHD, of_all[0], of_all[1], options);
  return dropout(projection(reshape(mixed_BTHD, {b, t, heads * head_dim}), region.output_layout()));
}

}  // namespace sheaf::nn
