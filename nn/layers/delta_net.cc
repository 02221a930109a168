#include "sheaf/nn/layers/delta_net.h"

#include <cmath>

#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/delta_rule.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::nn {
namespace {

const DeltaNetConfig& checked(const DeltaNetConfig& c) {
  check<ConfigError>(c.width > 0 && c.key_heads > 0 && c.value_heads > 0 && c.value_heads % c.key_heads == 0 && c.key_width > 0 &&
                         c.value_width > 0 && c.taps > 0,
                     "[delta_net] wants positive sizes, and value heads that are a multiple of the key heads: width ", c.width, ", ",
                     c.key_heads, " key heads of ", c.key_width, ", ", c.value_heads, " value heads of ", c.value_width, ", ", c.taps,
                     " taps");
  return c;
}

int64_t key_elements(const DeltaNetConfig& c) { return c.key_heads * c.key_width; }
int64_t value_elements(const DeltaNetConfig& c) { return c.value_heads * c.value_width; }
int64_t readers(const DeltaNetConfig& c) { return c.value_heads / c.key_heads; }

// A tensor axis shards the heads, and so does a context axis: key heads, each with the value heads that read it.
OwnershipMap qkv_cut(int dim, const DeltaNetConfig& c) {
  return OwnershipMap::parts(dim, {key_elements(c), key_elements(c), value_elements(c)}, c.key_heads);
}
OwnershipMap rates_cut(int dim, const DeltaNetConfig& c) { return OwnershipMap::parts(dim, {c.value_heads, c.value_heads}, c.key_heads); }
OwnershipMap values_cut(int dim, const DeltaNetConfig& c) { return OwnershipMap::even(dim, readers(c) * c.value_width); }

Parameter of_heads(const DeltaNetConfig& c, const Init& init) {
  Parameter p({c.value_heads}, init);
  p.keep_exact();
  p.set_cut(OwnershipMap::even(0, readers(c)));
  return p;
}

}  // namespace

// Rates of decay are drawn so that heads remember from about one token to some thousands: exp(log_decay) in [1, 16), softplus of the
// bias about in [0.001, 0.1) (Mamba's: Gu and Dao, https://arxiv.org/abs/2312.00752, section 3.6).
GatedDeltaNet::GatedDeltaNet(const DeltaNetConfig& c)
    : config(checked(c)),
      qkv(c.width, 2 * key_elements(c) + value_elements(c), {.bias = false, .init = c.init, .cut = qkv_cut(0, c)}),
      gate(c.width, value_elements(c), {.bias = false, .init = c.init, .cut = values_cut(0, c)}),
      rates(c.width, 2 * c.value_heads, {.bias = false, .init = c.init, .cut = rates_cut(0, c)}),
      taps({2 * key_elements(c) + value_elements(c), c.taps}, Init::uniform(1 / std::sqrt(static_cast<double>(c.taps)))),
      log_decay(of_heads(c, Init::between(0, std::log(16.0)))),
      decay_bias(of_heads(c, Init::between(std::log(0.001), std::log(0.1)))),
      norm(c.value_width, c.norm_eps),
      projection(value_elements(c), c.width, {.bias = false, .init = c.projection_init, .cut = values_cut(1, c)}),
      dropout(c.dropout) {
  taps.set_cut(qkv_cut(0, c));
  for (Parameter* p : {&taps, &rates.weight}) p->set_table();  // rows are independent, like a router's: not for Muon, adapters, FP8 and
                                                               // blocks
}

// Reads tokens, starting with the one whose preceding state is `options.initial`.
DeltaRuleResult GatedDeltaNet::read(const Tensor& qkv_BTF, const Tensor& rates_BTR, GatedDeltaRuleOptions options) const {
  const DeltaNetConfig& c = config;
  options.heads = c.value_heads, options.key_heads = c.key_heads, options.key_width = c.key_width;
  const auto parts = split(cast(rates_BTR, log_decay.dtype()), {c.value_heads, c.value_heads}, 2);
  const Tensor decay_BTH = -(exp(log_decay) * softplus(parts[1] + decay_bias));
  return gated_delta_rule(qkv_BTF, decay_BTH, sigmoid(parts[0]), options);
}

Tensor GatedDeltaNet::forward(const Tensor& x_BTC, KeyValueCache* cache, const Tensor& given_begins_BT) {
  check<ConfigError>(!cache || !given_begins_BT, "[delta_net] '", path_label(path()), "': the tokens of a cache are one document");
  const DeltaNetConfig& c = config;
  const TensorRegion region(x_BTC, qkv.weight);
  const Tensor begins_BT = region.enter_begins(given_begins_BT);
  const Tensor in_BTC = region.enter(x_BTC, qkv.fp8 == Fp8::none);
  ContextRegion context, of_rates;
  const auto enter = [&](ContextRegion& into, const OwnershipMap& cut) { return region ? OutputLayout() : into.output_layout(cut); };
  Tensor qkv_BTF = qkv(in_BTC, enter(context, qkv_cut(2, c))), rates_BTR = rates(in_BTC, enter(of_rates, rates_cut(2, c)));
  if (region) {
    context = ContextRegion(qkv_BTF, qkv_cut(2, c)), of_rates = ContextRegion(rates_BTR, rates_cut(2, c));
    qkv_BTF = context.enter(qkv_BTF), rates_BTR = of_rates.enter(rates_BTR);
  }
  Tensor y_BTF;
  // Padding is all zeros: the state, which is zero, stays zero, and the convolution adds nothing.
  if (cache && qkv_BTF.size(1) > 1 && cache->begins(qkv_BTF.size(1))) qkv_BTF = where(unsqueeze(cache->is_read(qkv_BTF.size(1)), {2}), qkv_BTF, 0.0);
  if (cache) y_BTF = read_on(qkv_BTF, rates_BTR, *cache);
  else y_BTF = read(causal_conv(qkv_BTF, taps, {.silu = true, .begins = begins_BT}), rates_BTR, {.begins = begins_BT}).out;
  y_BTF = context.leave(y_BTF, /*in_pieces=*/false);
  const Shape packed = y_BTF.shape();
  const Tensor normed_BTHE = norm(reshape(y_BTF, {packed[0], packed[1], c.value_heads, c.value_width}));
  const Tensor gated_BTF = swiglu(gate(in_BTC), reshape(normed_BTHE, packed));
  return dropout(projection(gated_BTF, region.output_layout()));
}

// Chunks begin at multiples of kDeltaChunk, with a cache, too: so a token has the same bits as in one pass. The state before a chunk
// is kept, and the tokens since then are read again.
Tensor GatedDeltaNet::read_on(const Tensor& qkv_BTF, const Tensor& rates_BTR, KeyValueCache& cache) const {
  constexpr int64_t kChunk = kernels::kDeltaChunk;
  RecurrentTail& tail = cache.tail(path());
  const int64_t before = cache.length(), end = before + qkv_BTF.size(1), last = end / kChunk * kChunk;
  auto [from, state] = tail.state_at(path(), before);
  const Tensor all_BTF = tail.rows_and(0, qkv_BTF), all_rates_BTR = tail.rows_and(1, rates_BTR);
  const Tensor conv_BTF = causal_conv(all_BTF, taps, {.silu = true});
  std::vector<Tensor> out;
  for (int64_t begin = from, stop = 0; begin < end; begin = stop) {
    // States are kept before the last two chunks, so that a few tokens can be forgotten.
    stop = begin < last - kChunk ? last - kChunk : begin < last ? last : end;
    const auto part = [&](const Tensor& x) { return slice(x, 1, begin - tail.first(), stop - tail.first()); };
    const DeltaRuleResult r = read(part(conv_BTF), part(all_rates_BTR), {.initial = state, .keeps_state = true});
    out.push_back(r.out);
    state = r.state;
    if (stop % kChunk == 0) tail.keep_state(stop, state);
  }
  tail.keep_rows({all_BTF, all_rates_BTR}, config.taps - 1);
  const Tensor y_BTF = concat(out, 1);
  return slice(y_BTF, 1, before - from, end - from);
}

}  // namespace sheaf::nn
