#include "sheaf/nn/layers/attention.h"

#include "sheaf/autograd/recording.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::nn {
namespace {

// `c` with the numbers that it leaves open.
AttentionConfig complete(AttentionConfig c) {
  check<ConfigError>(c.heads > 0 && c.width > 0 && (c.head_dim > 0 || (c.head_dim == 0 && c.width % c.heads == 0)),
                     "[attention] width ", c.width, " is not a multiple of ", c.heads, " heads");
  check<ConfigError>(c.kv_heads == 0 || (c.kv_heads > 0 && c.heads % c.kv_heads == 0), "[attention] ", c.heads,
                     " heads are not a multiple of ", c.kv_heads, " key and value heads");
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  if (c.head_dim == 0) c.head_dim = c.width / c.heads;
  check<ConfigError>(c.softcap >= 0, "[attention] softcap ", c.softcap, ": a positive number; 0: scores are not capped");
  check<ConfigError>(c.window >= 0, "[attention] window ", c.window, ": a token sees at least itself; 0: all keys");
  check<ConfigError>(c.causal || c.window == 0, "[attention] window ", c.window, ", not causal: windows are of a causal mask");
  check<ConfigError>(c.rope_theta == 0.0 || c.rotary_dim > 0 || c.head_dim % 2 == 0, "[attention] rotary positions need heads of even width, not ", c.head_dim);
  check<ConfigError>(c.rotary_dim % 2 == 0 && c.rotary_dim >= 0 && c.rotary_dim <= c.head_dim, "[attention] rotary_dim ", c.rotary_dim,
                     ": an even number of elements of a head, which has ", c.head_dim);
  check<ConfigError>(c.qk_norm || !c.qk_norm_all_heads, "[attention] qk_norm_all_heads: without qk_norm there is no norm");
  return c;
}

// A tensor axis shards the heads, and so does a context axis. Queries read the keys of their group: all are sharded in as many units
// as there are key heads, or copies of these. `dim` is that of the packed projections.
OwnershipMap head_cut(int dim, int64_t heads, int64_t kv_heads, int64_t width, int64_t units) {
  return OwnershipMap::parts(dim, {heads * width, kv_heads * width, kv_heads * width}, units);
}

}  // namespace

SelfAttention::SelfAttention(const AttentionConfig& given)
    : config(complete(given)),
      qkv(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, {config.bias || config.qkv_bias, config.init}),
      projection(config.heads * config.head_dim, config.width, {config.bias || config.out_bias, config.projection_init}),
      dropout(config.dropout) {
  const int64_t h = config.heads, g = config.kv_heads, d = config.head_dim;
  if (config.gate) gate.emplace(config.width, h * d, LinearOptions{config.bias, config.init});
  if (config.sinks) sinks = Parameter({h}, config.init);
  if (config.qk_norm) {
    query_norm.emplace(config.qk_norm_all_heads ? h * d : d, config.norm_eps);
    key_norm.emplace(config.qk_norm_all_heads ? g * d : d, config.norm_eps);
  }
  cut_heads(g);
}

Tensor document_begins(const Tensor& tokens_BT, int64_t end_of_text) {
  return sheaf::document_begins(whole_sequences(tokens_BT), end_of_text);
}

int64_t head_units(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ranks) {
  const int64_t group = heads / kv_heads;
  int64_t most = 1;
  for (int64_t copies = 1; copies <= group && kv_heads * most < ranks; ++copies)
    if (group % copies == 0 && head_dim % copies == 0) most = copies;
  return kv_heads * most;
}

void SelfAttention::cut_heads(int64_t units) {
  if (qkv.weight.cut() && qkv.weight.cut()->granule() == units) return;
  const int64_t h = config.heads, g = config.kv_heads, d = config.head_dim;
  qkv.set_cut(head_cut(0, h, g, d, units));
  if (gate) gate->set_cut(OwnershipMap::even(0, h / units * d));
  projection.set_cut(OwnershipMap::even(1, h / units * d));
  if (sinks) sinks.set_cut(OwnershipMap::even(0, h / units));
  if (!config.qk_norm_all_heads) return;
  query_norm->weight.set_cut(OwnershipMap::even(0, h * d / units));
  key_norm->weight.set_cut(OwnershipMap::even(0, g * d / units));
}

AttentionOptions SelfAttention::options(const Tensor& begins_BT) const {
  const AttentionConfig& c = config;
  const double scale = c.scale / std::sqrt(static_cast<double>(c.head_dim));
  return {.causal = c.causal, .scale = scale, .softcap = c.softcap, .begins = begins_BT, .window = c.window, .sinks = sinks};
}

Tensor SelfAttention::normed_over_heads(const Tensor& qkv_BTE) const {
  const AttentionConfig& c = config;
  const int64_t keys = c.kv_heads * c.head_dim;
  const std::vector<Tensor> parts = split(qkv_BTE, {c.heads * c.head_dim, keys, keys}, 2);
  const std::vector<Tensor> normed = rms_norms_of_shared_rows({parts[0], parts[1]}, {&*query_norm, &*key_norm});
  return concat_as({normed[0], normed[1], parts[2]}, 2, qkv_BTE.type());
}

// If units are parts of key heads, each rank has its queries but only parts of their keys: keys and values, few elements per token,
// are gathered on all ranks, and each takes the heads that its queries read.
Tensor SelfAttention::with_whole_keys(const Tensor& qkv_BTE, int64_t units) const {
  const AttentionConfig& c = config;
  const auto parts = split(qkv_BTE, {c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim}, 2);
  const Tensor &q_BTE = parts[0], &kv_BTE = parts[1];
  const Tensor whole = redistribute(kv_BTE, kv_BTE.layout().with(qkv.weight.cut_axis(), Placement::replicate()));
  return pack_heads(q_BTE, whole, c.heads, c.kv_heads, units / c.kv_heads);
}

Tensor SelfAttention::forward(const Tensor& x_BTC, KeyValueCache* cache, const Tensor& given_begins_BT) {
  const AttentionConfig& c = config;
  check<ConfigError>(!cache || !given_begins_BT, "[attention] '", path_label(path()), "': the tokens of a cache are one document");
  check<ConfigError>(c.causal || !cache, "[attention] '", path_label(path()), "' is not causal: tokens in a cache would have to see those that follow");
  const Tensor rows_BT = cache ? cache->begins(x_BTC.size(1)) : Tensor();
  const TensorRegion region(x_BTC, qkv.weight);
  const Tensor begins_BT = region.enter_begins(given_begins_BT);
  // If more ranks share a layer, or a sequence, than there are key heads, some have copies.
  int64_t keys = qkv.weight.cut_axis() < 0 ? c.kv_heads : qkv.weight.cut()->granule();
  const bool gathers = context_comm == ContextComm::all_gather;
  ContextRegion context;
  const auto enter = [&](const Type& made) {  // in pieces, if nothing is computed in between
    if (gathers || region || c.qk_norm_all_heads || ContextRegion::copies(made, keys, c.heads / keys) > 1) return made.layout;
    return context.output_layout(head_cut(2, c.heads, keys, c.head_dim, keys))(made);
  };
  const Tensor in_BTC = region.enter(x_BTC, qkv.fp8 == Fp8::none);
  Tensor qkv_BTE = qkv(in_BTC, enter);  // E = (H + 2 G) D, packed: its gradient is one tensor, not three padded ones
  if (c.qk_norm_all_heads) qkv_BTE = normed_over_heads(qkv_BTE);
  if (keys > c.kv_heads) qkv_BTE = with_whole_keys(qkv_BTE, keys);
  if (!gathers && !context) {
    const int64_t copies = ContextRegion::copies(qkv_BTE.type(), keys, c.heads / keys);
    qkv_BTE = repeat_key_heads(qkv_BTE, c.heads, keys, copies);
    keys *= copies;
    context = ContextRegion(qkv_BTE, head_cut(2, c.heads, keys, c.head_dim, keys));
    qkv_BTE = context.enter(qkv_BTE);
  }
  const bool norms_heads = query_norm && !c.qk_norm_all_heads;
  if (norms_heads || c.rope_theta != 0.0) {
    const Shape packed = qkv_BTE.shape();
    Tensor heads_BTHD = reshape(qkv_BTE, {packed[0], packed[1], c.heads + 2 * keys, c.head_dim});
    if (norms_heads) heads_BTHD = packed_rms_norm(heads_BTHD, c.heads, query_norm->weight, key_norm->weight, query_norm->eps);
    const int64_t first = cache ? cache->length() : 0;
    if (c.rope_theta != 0.0)
      heads_BTHD = rotary(heads_BTHD, {.theta = c.rope_theta, .first_position = first, .heads = c.heads + keys,
                                       .width = c.rotary_dim ? c.rotary_dim : -1, .scaling = c.rope_scaling, .begins = rows_BT});
    qkv_BTE = reshape(heads_BTHD, packed);
  }
  Tensor mixed_BTC;
  if (cache) mixed_BTC = attend(qkv_BTE, keys, rows_BT, [&](const Tensor& kv_BTGD) { return cache->append(path(), kv_BTGD); });
  else if (gathers) mixed_BTC = attend(qkv_BTE, keys, begins_BT, [&](const Tensor& kv_BTGD) { return whole_keys_values(kv_BTGD, c.heads / keys); });
  else mixed_BTC = packed_attention(qkv_BTE, c.heads, keys, options(begins_BT));
  mixed_BTC = context.leave(mixed_BTC, !gate && !region && projection.fp8 == Fp8::none);
  if (gate) mixed_BTC = mixed_BTC * sigmoid((*gate)(in_BTC));
  return dropout(projection(mixed_BTC, region.output_layout()));
}

// Queries are those of these tokens, keys and values of more. The backward keeps the sharded keys and values, not the gathered ones.
template <class WholeKeys>
Tensor SelfAttention::attend(const Tensor& qkv_BTE, int64_t keys, const Tensor& begins_BT, WholeKeys&& whole_keys) const {
  const AttentionConfig& c = config;
  const int64_t b = qkv_BTE.size(0), t = qkv_BTE.size(1), both = 2 * keys;
  const auto parts = split(reshape(qkv_BTE, {b, t, c.heads + both, c.head_dim}), {c.heads, both}, 2);
  const Tensor &q_BTHD = parts[0], &kv_BTGD = parts[1];
  std::vector<Tensor> of_all;  // [B, S, G, D]: keys, values
  {
    const RecomputeScope again({.results = true});
    of_all = chunk(whole_keys(kv_BTGD), 2, 2);
  }
  return reshape(attention(q_BTHD, of_all[0], of_all[1], options(begins_BT)), {b, t, c.heads * c.head_dim});
}

}  // namespace sheaf::nn
