#include "sheaf/nn/layers/latent_attention.h"

#include <cmath>

#include "sheaf/autograd/recording.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::nn {
namespace {

const LatentAttentionConfig& checked(const LatentAttentionConfig& c) {
  check<ConfigError>(c.width > 0 && c.heads > 0 && c.kv_lora_rank > 0 && c.q_lora_rank >= 0 && c.qk_nope_head_dim > 0 &&
                         c.qk_rope_head_dim > 0 && c.v_head_dim > 0,
                     "[latent_attention] wants positive sizes: width ", c.width, ", heads ", c.heads, ", kv_lora_rank ", c.kv_lora_rank,
                     ", q_lora_rank ", c.q_lora_rank,
                     ", qk_nope_head_dim ", c.qk_nope_head_dim, ", qk_rope_head_dim ", c.qk_rope_head_dim, ", v_head_dim ", c.v_head_dim);
  check<ConfigError>(c.qk_rope_head_dim % 2 == 0, "[latent_attention] rotary positions need a qk_rope_head_dim that is even, not ",
                     c.qk_rope_head_dim);
  check<ConfigError>(c.window >= 0, "[latent_attention] window ", c.window, ": a token sees at least itself; 0: all keys");
  return c;
}

int64_t key_width(const LatentAttentionConfig& c) { return c.qk_nope_head_dim + c.qk_rope_head_dim; }
int64_t up_width(const LatentAttentionConfig& c) { return c.qk_nope_head_dim + c.v_head_dim; }

// A tensor axis shards the heads, and so does a context axis: `width` elements of dimension `dim` each.
LinearOptions without_bias(const Init& init) { return {.bias = false, .init = init}; }
LinearOptions by_heads(const Init& init, int dim, int64_t width) {
  return {.bias = false, .init = init, .cut = OwnershipMap::even(dim, width)};
}

}  // namespace

LatentAttention::LatentAttention(const LatentAttentionConfig& c)
    : config(checked(c)),
      latents(c.width, c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim, without_bias(c.init)),
      latent_norm(c.kv_lora_rank, c.norm_eps),
      queries(c.q_lora_rank ? c.q_lora_rank : c.width, c.heads * key_width(c), by_heads(c.init, 0, key_width(c))),
      keys_values(c.kv_lora_rank, c.heads * up_width(c), by_heads(c.init, 0, up_width(c))),
      projection(c.heads * c.v_head_dim, c.width, by_heads(c.projection_init, 1, c.v_head_dim)),
      dropout(c.dropout) {
  if (!c.q_lora_rank) return;
  query_norm.emplace(c.q_lora_rank, c.norm_eps);
  latents.weight.set_matrices({c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim});
}

// The last R elements of each head of x[B, T, heads ..].
Tensor LatentAttention::rotated(const Tensor& x_BTE, int64_t heads, KeyValueCache* cache) const {
  const Shape packed = x_BTE.shape();
  const Tensor heads_BTHD = reshape(x_BTE, {packed[0], packed[1], heads, packed[2] / heads});
  return reshape(rotary(heads_BTHD, {.theta = config.rope_theta,
                                     .first_position = cache ? cache->length() : 0,
                                     .width = config.qk_rope_head_dim,
                                     .neighbours = true,
                                     .scaling = config.rope_scaling,
                                     .begins = cache ? cache->begins(packed[1]) : Tensor()}),
                 packed);
}

Tensor LatentAttention::forward(const Tensor& x_BTC, KeyValueCache* cache, const Tensor& given_begins_BT) {
  check<ConfigError>(!cache || !given_begins_BT, "[latent_attention] '", path_label(path()), "': the tokens of a cache are one document");
  const LatentAttentionConfig& c = config;
  const TensorRegion region(x_BTC, projection.weight);
  const Tensor begins_BT = region.enter_begins(given_begins_BT);
  const Tensor latents_BTL = region.enter(latents(x_BTC), /*in_pieces=*/false);
  const auto parts = split(latents_BTL, {c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim}, 2);
  const bool gathers = context_comm == ContextComm::all_gather;
  ContextRegion of_queries, of_keys;
  const auto into = [&](ContextRegion& context, int64_t width) {
    return gathers ? OutputLayout() : context.output_layout(OwnershipMap::even(2, width));
  };
  const OutputLayout whole_queries = into(of_queries, key_width(c)), whole_keys = into(of_keys, up_width(c));
  Tensor q_BTD, up_BTE, shared_BTR;
  if (query_norm) q_BTD = queries((*query_norm)(parts[0]), whole_queries);
  else if (region) q_BTD = redistribute_output(queries(region.enter(x_BTC, queries.fp8 == Fp8::none)), whole_queries);  // that comes in pieces
  else q_BTD = queries(x_BTC, whole_queries);
  q_BTD = rotated(q_BTD, c.heads, cache);
  const auto make_keys = [&](const Tensor& of_keys_BTL) {
    const auto narrow = split(of_keys_BTL, {c.kv_lora_rank, c.qk_rope_head_dim}, 2);
    up_BTE = keys_values(latent_norm(narrow[0]), whole_keys), shared_BTR = narrow[1];
  };
  if (gathers) {  // latents, which are narrow: each rank computes all keys and values from them, again in the backward
    const RecomputeScope again({.results = true});
    make_keys(whole_sequences(parts[1]));
    shared_BTR = rotated(shared_BTR, 1, cache);
  } else {
    make_keys(parts[1]);
    shared_BTR = rotated(whole_sequences(shared_BTR), 1, cache);
  }
  const AttentionOptions options{.scale = c.scale / std::sqrt(static_cast<double>(key_width(c))),
                                 .begins = cache ? cache->begins(x_BTC.size(1)) : begins_BT,
                                 .window = c.window};
  const Tensor mixed_BTE = cache ? attend_to_cache(q_BTD, up_BTE, shared_BTR, options, *cache)
                                 : latent_attention(q_BTD, up_BTE, shared_BTR, c.heads, options);
  return dropout(projection(of_queries.leave(mixed_BTE, !region && projection.fp8 == Fp8::none), region.output_layout()));
}

Tensor LatentAttention::attend_to_cache(const Tensor& q_BTD, const Tensor& up_BTE, const Tensor& shared_BTR,
                                        const AttentionOptions& options, KeyValueCache& cache) const {
  const int64_t b = q_BTD.size(0), t = q_BTD.size(1), h = config.heads, n = config.qk_nope_head_dim, r = config.qk_rope_head_dim;
  const Tensor up_BTHE = reshape(up_BTE, {b, t, h, up_width(config)});
  const Tensor shared_BTHR = expand(reshape(shared_BTR, {b, t, 1, r}), {b, t, h, r});
  const Tensor k_BSHD = cache.append(path() + ".keys", concat({slice(up_BTHE, 3, 0, n), shared_BTHR}, 3));
  const Tensor v_BSHE = cache.append(path() + ".values", slice(up_BTHE, 3, n, up_width(config)));
  return reshape(attention(reshape(q_BTD, {b, t, h, n + r}), k_BSHD, v_BSHE, options), {b, t, h * config.v_head_dim});
}

}  // namespace sheaf::nn
