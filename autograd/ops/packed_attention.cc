// Scaled dot-product attention of a packed projection of queries, keys and values; sizes are named in kernels/attention.h.
#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/attention_sinks.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct PackedAttrs {
  double scale;
  int32_t causal, heads, key_heads, width;
  int64_t window;
  double softcap;
};

/// A shard of the packed heads in `units` of whole key heads, each with the query heads that read it.
struct PackedCut {
  Placement qkv, out, lse, sinks;
};
std::optional<PackedCut> packed_cut(const PackedAttrs& a, int64_t units, const Placement& like) {
  if (units <= 0 || a.key_heads % units != 0 || a.width == 0) return {};
  const auto cut = [&](const OwnershipMap& map) { return shard_like(like, map); };
  const int64_t queries = int64_t{a.heads} * a.width, keys = int64_t{a.key_heads} * a.width;
  return PackedCut{cut(OwnershipMap::parts(2, {queries, keys, keys}, units)), cut(OwnershipMap::even(2, queries / units)),
                   cut(OwnershipMap::even(1, a.heads / units)), cut(OwnershipMap::even(0, a.heads / units))};
}

kernels::PackedHeads heads_of(const PackedAttrs& a, const View& qkv) {
  return {qkv, a.heads, a.key_heads, a.width};
}
/// A packed result [B, T, H D], by heads.
View heads_of_queries(const PackedAttrs& a, const View& x) {
  return kernels::heads_of(x, 0, a.heads, a.width);
}

/// qkv, out, dout, lse, sinks[H] if kSinks, begins if there are documents -> dqkv, and if kSinks the queries' contributions to
/// dsinks, [B, H, T].
template <bool kSinks>
struct PackedAttentionBackward {
  static constexpr const char* kName = kSinks ? "packed_attention_with_sinks_backward" : "packed_attention_backward";
  using Attrs = PackedAttrs;
  static constexpr int kBegins = 4 + kSinks;
  static void infer(const Attrs&, Infer& c) {
    c.output(c.dtype(0), c.shape(0));
    if (kSinks) c.output(c.dtype(3), c.shape(3));
  }
  static void place(const Attrs& a, Place& p) {
    const SinkRules rule{p, kSinks, /*backward=*/true};
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || (kSinks && i == 4)) continue;
      const Placement& x = p.in(i);
      if (x.is_shard(0)) rule({x, x, x, x}, {x}, {.of_sinks = x, .begins = x});
      const int64_t units = i == 0   ? packed_units(p.in(0))
                            : i == 3 ? even_units(p.in(3), 1, a.heads)
                                     : even_units(p.in(i), 2, int64_t{a.heads} * a.width);
      if (const auto cut = packed_cut(a, units, p.in(i)))
        rule({cut->qkv, cut->out, cut->out, cut->lse}, {cut->qkv}, {.sinks = cut->sinks, .of_sinks = cut->lse});
      break;
    }
    rule({kR, kR, kR, kR}, {kR}, {});
    rule({kR, kR, kP, kR}, {kP}, {.of_sinks = kP});
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0)), d = heads_of(a, c.output(0));
    return SHEAF_WORKSPACE(c.device(), attention_backward, in.q, in.k, in.v,
                 heads_of_queries(a, c.input(1)), c.input(3), heads_of_queries(a, c.input(2)),
                 mask_of(a, c, kBegins), d.q, d.k, d.v);
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0)), d = heads_of(a, c.output(0));
    const View out = heads_of_queries(a, c.input(1)), dout = heads_of_queries(a, c.input(2));
    SHEAF_ON_DEVICE(stream, attention_backward, in.q, in.k, in.v, out, c.input(3), dout, mask_of(a, c, kBegins), a.scale, d.q, d.k, d.v,
                 c.workspace);
    if constexpr (kSinks) SHEAF_ON_DEVICE(stream, attention_sinks_backward, c.input(4), out, c.input(3), dout, c.output(1));
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_backward = backward_operations(w, a, w.input(1), w.input(1), w.input(1)[1], a.width);
  }
  static constexpr uint64_t kSavedInputs = kSinks ? 0b110101 : 0b10101;
  static void vjp(const Attrs& a, Vjp& c) {
    const auto by_heads = [&](const Tensor& x, int64_t heads) { return reshape(x, {x.size(0), x.size(1), heads, a.width}); };
    const auto unpacked = [&](const Tensor& qkv) {
      if (!qkv) return AttentionBackwardOperands();
      const int64_t queries = int64_t{a.heads} * a.width, keys = int64_t{a.key_heads} * a.width;
      const auto parts = split(qkv, {queries, keys, keys}, 2);
      return AttentionBackwardOperands{by_heads(parts[0], a.heads), by_heads(parts[1], a.key_heads), by_heads(parts[2], a.key_heads)};
    };
    AttentionBackwardOperands x = unpacked(c.input(0)), u = unpacked(grad_if(true, c, 0));
    x.dout = by_heads(c.input(2), a.heads);
    if (kSinks) x.sinks = c.input(4), u.sinks = grad_if(true, c, 1);
    const AttentionBackwardOperands d = attention_second(x, u, visible_keys(a, c, kBegins), a.scale);
    const auto packed = [](const Tensor& x_BTHD) { return reshape(x_BTHD, {x_BTHD.size(0), x_BTHD.size(1), x_BTHD.size(2) * x_BTHD.size(3)}); };
    c.set(0, concat_as({packed(d.q), packed(d.k), packed(d.v)}, 2, c.input_type(0)));
    c.set(2, packed(d.dout));
    if (kSinks) c.set(4, d.sinks);
  }
};

/// qkv[B, T, (H + 2 G) D], sinks[H] if kSinks, begins[B, T] if there are documents -> out[B, T, H D], lse[B, H, T].
template <bool kSinks>
struct PackedAttention {
  static constexpr const char* kName = kSinks ? "packed_attention_with_sinks" : "packed_attention";
  using Attrs = PackedAttrs;
  static constexpr int kBegins = 1 + kSinks;
  static constexpr uint64_t kSavedInputs = kSinks ? 0b111 : 0b11, kSavedOutputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    const Shape& x = c.shape(0);
    if (kSinks) check_sinks(kName, c.input(1), a.heads, c.dtype(0));
    check_begins(kName, c, kBegins, {x[0], x[1]}, a.causal, x[1]);
    c.output(c.dtype(0), {x[0], x[1], int64_t{a.heads} * a.width});
    c.output(statistics_dtype(c.dtype(0)), {x[0], a.heads, x[1]});
  }
  static void place(const Attrs& a, Place& p) {
    const SinkRules rule{p, kSinks, /*backward=*/false};
    for (const int i : {0, kBegins})
      if (i < p.num_inputs() && p.in(i).is_shard(0)) rule({p.in(i)}, {p.in(i), p.in(i)}, {.begins = p.in(i)});
    if (const auto cut = packed_cut(a, packed_units(p.in(0)), p.in(0)))
      rule({cut->qkv}, {cut->out, cut->lse}, {.sinks = cut->sinks});
    rule({kR}, {kR, kR}, {});
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0));
    return SHEAF_WORKSPACE(c.device(), attention, in.q, in.k, in.v, mask_of(a, c, kBegins),
                 heads_of_queries(a, c.output(0)), c.output(1));
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0));
    const View out = heads_of_queries(a, c.output(0));
    SHEAF_ON_DEVICE(stream, attention, in.q, in.k, in.v, mask_of(a, c, kBegins), a.scale, out, c.output(1), c.workspace);
    if constexpr (kSinks) SHEAF_ON_DEVICE(stream, attention_sinks, c.input(1), out, c.output(1));
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_forward = forward_operations(w, a, w.output(0), w.output(0), w.output(0)[1], a.width);
  }
  static void vjp(const Attrs& a, Vjp& c) { set_gradients<PackedAttentionBackward<kSinks>>(a, c, 1, kSinks); }
  static void describe(const Attrs& a, std::string& out) {
    out += str(describe_mask(a.causal, a.window, a.softcap), "heads ", a.heads, "/", a.key_heads, " scale ", a.scale);
  }
};

}  // namespace

Tensor packed_attention(const Tensor& qkv, int64_t heads, int64_t kv_heads,
                        const AttentionOptions& options) {
  expect_defined("packed_attention", qkv);
  const int64_t parts = heads + 2 * kv_heads;
  if (qkv.rank() != 3 || heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0 ||
      qkv.size(2) % parts != 0)
    fail<ShapeError>("[packed_attention] wants [B, T, (H + 2 G) D] with H a multiple of G, got ",
                     qkv.type(), ", H ", heads, ", G ", kv_heads);
  check_mask("packed_attention", options);
  const int64_t width = qkv.size(2) / parts;
  const PackedAttrs attrs{scale_of(options, width), options.causal, static_cast<int32_t>(heads),
                          static_cast<int32_t>(kv_heads), static_cast<int32_t>(width), options.window, options.softcap};
  std::vector<Tensor> in = {dense_rows(qkv)};
  push_others(in, options, qkv.dtype());
  return apply(options.sinks ? op_def<PackedAttention<true>>() : op_def<PackedAttention<false>>(), &attrs, in)[0];
}

}  // namespace sheaf
