// Scaled dot-product attention, blocked; sizes are named in kernels/attention.h.
#include "sheaf/kernels/attention.h"

#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/autograd/ops/query_runs.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct AttentionAttrs {
  double scale;
  int64_t causal, window;
};

/// The cut of heads that queries share with keys: a key head goes with the query heads that read
/// it. `of_queries` tells whose cut `map` is.
struct HeadCut {
  Placement queries, keys, lse;
};
std::optional<HeadCut> head_cut(const Place& p, const OwnershipMap& map, bool of_queries) {
  const int64_t group = p.shape(1)[2] > 0 ? p.shape(0)[2] / p.shape(1)[2] : 1;
  if (of_queries && !map.can_move(1, group)) return {};
  const OwnershipMap q = of_queries ? map : map.moved_to(2, group),
                     k = of_queries ? map.moved_to(2, 1, group) : map;
  return HeadCut{Placement::shard(q), Placement::shard(k), Placement::shard(q.moved_to(1))};
}

struct AttentionBackward {  // q, k, v, out, dout, lse, begins if there are documents -> dq, dk, dv
  static constexpr const char* kName = "attention_backward";
  static constexpr HeadDims kHeads = {{2, 2, 2, 2, 2, 1, -1}, {2, 2, 2}};
  using Attrs = AttentionAttrs;
  static void infer(const Attrs&, Infer& c) {
    for (int i = 0; i < 3; ++i) c.output(c.dtype(i), c.shape(i));
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (p.in(i).map().dim() == 0) rule_all(p, p.in(i), p.in(i), 3);
      if (i == 0 && cuts_queries(p, p.in(0), a.causal))
        rule_of(p, {p.in(0), kR, kR, p.in(0), p.in(0), lse_of(p.in(0))}, {p.in(0), kP, kP});
      if (i >= 5 || p.in(i).map().dim() != 2) break;
      if (const auto cut = head_cut(p, p.in(i).map(), i == 0 || i > 2))
        rule_of(p, {cut->queries, cut->keys, cut->keys, cut->queries, cut->queries, cut->lse},
                {cut->queries, cut->keys, cut->keys});
      break;
    }
    rule_all(p, kR, kR, 3);
    rule_of(p, {kR, kR, kR, kR, kP, kR}, {kP, kP, kP});  // linear in dout
    rule_of(p, {kR, kR, kP, kP, kR, kR}, {kP, kP, kR});  // and in v and out together
  }
  static AttentionBackwardCall call(const Attrs& a, const Execute& c) {
    return {c.input(0), c.input(1), c.input(2), c.input(3),  c.input(5), c.input(4),
            mask_of(a, c, 6), a.scale, c.output(0), c.output(1), c.output(2)};
  }
  static int64_t workspace(const Attrs& a, const Execute& c) { return call(a, c).workspace(c); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    call(a, c).run(c, stream, c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_backward = backward_operations(w, a, w.input(0), w.input(3), w.input(1)[1], w.input(0)[3]);
  }
  static constexpr uint64_t kSavedInputs = 0b1010111;
  static void vjp(const Attrs& a, Vjp& c) {
    const AttentionBackwardOperands d =
        attention_second({c.input(0), c.input(1), c.input(2), c.input(4)}, {grad_if(true, c, 0), grad_if(true, c, 1), grad_if(true, c, 2)},
                         visible_keys(a, c, 6), a.scale);
    c.set(0, d.q);
    c.set(1, d.k);
    c.set(2, d.v);
    c.set(4, d.dout);
  }
};

struct Attention {  // q[B, T, H, D], k[B, S, G, D], v, begins[B, T] if there are documents -> out, lse[B, H, T]
  static constexpr const char* kName = "attention";
  static constexpr HeadDims kHeads = {{2, 2, 2, -1}, {2, 1}};
  using Attrs = AttentionAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111, kSavedOutputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = common_dtype(kName, c, 0, 3);
    require_floating(kName, d);
    const Shape &q = c.shape(0), &k = c.shape(1), &v = c.shape(2);
    if (q.rank() != 4 || k.rank() != 4 || v.rank() != 4 || !(v == Shape{k[0], k[1], k[2], v[3]}) || q[0] != k[0] ||
        q[3] != k[3] || k[2] == 0 || q[2] % k[2] != 0)
      fail<ShapeError>("[", kName, "] wants q [B,T,H,D], k [B,S,G,D] and v [B,S,G,E] with H a multiple of G; got ",
                       c.input(0), ", ", c.input(1), " and ", c.input(2));
    if (c.num_inputs() > 3) check_begins(kName, c.input(3), {q[0], q[1]}, a.causal, k[1] == q[1]);
    c.output(d, {q[0], q[1], q[2], v[3]});
    c.output(statistics_dtype(d), {q[0], q[2], q[1]});
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (p.in(i).map().dim() == 0) rule_all(p, p.in(i), p.in(i), 2);
      if (i == 0 && cuts_queries(p, p.in(0), a.causal)) rule_of(p, {p.in(0), kR, kR}, {p.in(0), lse_of(p.in(0))});
      if (p.in(i).map().dim() == 2)
        if (const auto cut = head_cut(p, p.in(i).map(), i == 0))
          rule_of(p, {cut->queries, cut->keys, cut->keys}, {cut->queries, cut->lse});
      break;
    }
    rule_all(p, kR, kR, 2);
    rule_of(p, {kR, kR, kP}, {kP, kR});  // linear in v
  }
  static AttentionCall call(const Attrs& a, const Execute& c) {
    return {c.input(0), c.input(1), c.input(2), c.output(0), c.output(1), mask_of(a, c, 3), a.scale};
  }
  static int64_t workspace(const Attrs& a, const Execute& c) { return call(a, c).workspace(c); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    call(a, c).run(c, stream, c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_forward = forward_operations(w, a, w.input(0), w.output(0), w.input(1)[1], w.input(0)[3]);
  }
  static void vjp(const Attrs& a, Vjp& c) { set_three_gradients<AttentionBackward>(a, c); }
  static void describe(const Attrs& a, std::string& out) {
    out += str(describe_mask(a.causal, a.window), "scale ", a.scale);
  }
};

struct PackedAttrs {
  double scale;
  int32_t causal, heads, key_heads, width;
  int64_t window;
};

/// The attributes of this rank's heads, input 0 being qkv: it holds the same fraction of all three.
PackedAttrs local_heads(PackedAttrs a, const Execute& c) {
  const int64_t local = c.input(0).shape[2], whole = c.input_type(0).shape[2];
  a.heads = static_cast<int32_t>(local_share(a.heads, local, whole));
  a.key_heads = static_cast<int32_t>(local_share(a.key_heads, local, whole));
  return a;
}

/// A cut of the packed heads in `units` of whole key heads, each with the query heads that read it.
struct PackedCut {
  Placement qkv, out, lse;
};
std::optional<PackedCut> packed_cut(const PackedAttrs& a, int64_t units, const Placement& like) {
  if (units <= 0 || a.key_heads % units != 0 || a.width == 0) return {};
  const auto cut = [&](const OwnershipMap& map) {
    return Placement::shard(like.map().is_inner() ? map.inner() : map);
  };
  const int64_t queries = int64_t{a.heads} * a.width, keys = int64_t{a.key_heads} * a.width;
  return PackedCut{cut(OwnershipMap::parts(2, {queries, keys, keys}, units)),
                   cut(OwnershipMap::even(2, queries / units)), cut(OwnershipMap::even(1, a.heads / units))};
}

kernels::PackedHeads heads_of(const PackedAttrs& a, const View& qkv) {
  return {qkv, a.heads, a.key_heads, a.width};
}
/// A packed result [B, T, H D].
View heads_of_queries(const PackedAttrs& a, const View& x) {
  return kernels::heads_of(x, 0, a.heads, a.width);
}

struct PackedAttentionBackward {  // qkv, out, dout, lse, begins if there are documents -> dqkv
  static constexpr const char* kName = "packed_attention_backward";
  using Attrs = PackedAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard()) continue;
      if (p.in(i).is_shard(0)) rule_all(p, p.in(i), p.in(i));
      const int64_t units = i == 0   ? packed_units(p.in(0))
                            : i == 3 ? even_units(p.in(3), 1, a.heads)
                                     : even_units(p.in(i), 2, int64_t{a.heads} * a.width);
      if (const auto cut = packed_cut(a, units, p.in(i)))
        rule_of(p, {cut->qkv, cut->out, cut->out, cut->lse}, {cut->qkv});
      break;
    }
    rule_all(p, kR, kR);
    rule_of(p, {kR, kR, kP, kR}, {kP});
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0)), d = heads_of(a, c.output(0));
    return SHEAF_WORKSPACE(c.device(), attention_backward, in.q, in.k, in.v,
                 heads_of_queries(a, c.input(1)), c.input(3), heads_of_queries(a, c.input(2)),
                 mask_of(a, c, 4), d.q, d.k, d.v);
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0)), d = heads_of(a, c.output(0));
    SHEAF_ON_DEVICE(stream, attention_backward, in.q, in.k, in.v, heads_of_queries(a, c.input(1)),
                 c.input(3), heads_of_queries(a, c.input(2)), mask_of(a, c, 4), a.scale, d.q, d.k, d.v,
                 c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_backward = 5 * attention_product(w, w.input(1), w.input(1)[1], a.width, a.causal, a.window);
  }
  static constexpr uint64_t kSavedInputs = 0b10101;
  static void vjp(const Attrs& a, Vjp& c) {
    const auto by_heads = [&](const Tensor& x, int64_t heads) { return reshape(x, {x.size(0), x.size(1), heads, a.width}); };
    const auto unpacked = [&](const Tensor& qkv) {
      const int64_t queries = int64_t{a.heads} * a.width, keys = int64_t{a.key_heads} * a.width;
      const auto parts = split(qkv, {queries, keys, keys}, 2);
      return AttentionBackwardOperands{by_heads(parts[0], a.heads), by_heads(parts[1], a.key_heads), by_heads(parts[2], a.key_heads)};
    };
    AttentionBackwardOperands x = unpacked(c.input(0));
    x.dout = by_heads(c.input(2), a.heads);
    const AttentionBackwardOperands d = attention_second(x, unpacked(c.grad()), visible_keys(a, c, 4), a.scale);
    const auto packed = [](const Tensor& x_BTHD) { return reshape(x_BTHD, {x_BTHD.size(0), x_BTHD.size(1), x_BTHD.size(2) * x_BTHD.size(3)}); };
    c.set(0, concat_as({packed(d.q), packed(d.k), packed(d.v)}, 2, c.input_type(0)));
    c.set(2, packed(d.dout));
  }
};

struct PackedAttention {  // qkv[B, T, (H + 2 G) D], begins[B, T] if there are documents -> out[B, T, H D], lse[B, H, T]
  static constexpr const char* kName = "packed_attention";
  using Attrs = PackedAttrs;
  static constexpr uint64_t kSavedInputs = 0b11, kSavedOutputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    const Shape& x = c.shape(0);
    if (c.num_inputs() > 1) check_begins(kName, c.input(1), {x[0], x[1]}, a.causal, true);
    c.output(c.dtype(0), {x[0], x[1], int64_t{a.heads} * a.width});
    c.output(statistics_dtype(c.dtype(0)), {x[0], a.heads, x[1]});
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i)
      if (p.in(i).is_shard(0)) rule_all(p, p.in(i), p.in(i), 2);
    if (const auto cut = packed_cut(a, packed_units(p.in(0)), p.in(0))) rule_of(p, {cut->qkv}, {cut->out, cut->lse});
    rule_all(p, kR, kR, 2);
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0));
    return SHEAF_WORKSPACE(c.device(), attention, in.q, in.k, in.v, mask_of(a, c, 1),
                 heads_of_queries(a, c.output(0)), c.output(1));
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const kernels::PackedHeads in = heads_of(a, c.input(0));
    SHEAF_ON_DEVICE(stream, attention, in.q, in.k, in.v, mask_of(a, c, 1), a.scale,
                 heads_of_queries(a, c.output(0)), c.output(1), c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_forward = 2 * attention_product(w, w.output(0), w.output(0)[1], a.width, a.causal, a.window);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    std::vector<Tensor> in = {c.input(0), c.output(0), dense_rows(c.grad()), c.output(1)};
    if (c.num_inputs() > 1) in.push_back(c.input(1));
    c.set(0, apply(op_def<PackedAttentionBackward>(), &a, in)[0]);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str(describe_mask(a.causal, a.window), "heads ", a.heads, "/", a.key_heads, " scale ", a.scale);
  }
};

}  // namespace

Tensor packed_attention(const Tensor& qkv, int64_t heads, int64_t key_heads,
                        const AttentionOptions& options) {
  const int64_t parts = heads + 2 * key_heads;
  if (qkv.rank() != 3 || heads <= 0 || key_heads <= 0 || heads % key_heads != 0 ||
      qkv.size(2) % parts != 0)
    fail<ShapeError>("[packed_attention] wants [B, T, (H + 2 G) D] with H a multiple of G, got ",
                     qkv.type(), ", H ", heads, ", G ", key_heads);
  check_window("packed_attention", options);
  const int64_t width = qkv.size(2) / parts;
  const PackedAttrs attrs{scale_of(options, width), options.causal, static_cast<int32_t>(heads),
                          static_cast<int32_t>(key_heads), static_cast<int32_t>(width), options.window};
  std::vector<Tensor> in = {dense_rows(qkv)};
  if (options.begins) in.push_back(dense_rows(options.begins));
  return apply(op_def<PackedAttention>(), &attrs, in)[0];
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  if (q.rank() != 4) fail<ShapeError>("[attention] wants q [B,T,H,D], got ", q.type());
  check_window("attention", options);
  const AttentionAttrs attrs{scale_of(options, q.size(3)), options.causal, options.window};
  std::vector<Tensor> in = {dense_rows(q), dense_rows(k), dense_rows(v)};
  if (options.begins) in.push_back(dense_rows(options.begins));
  return apply(op_def<Attention>(), &attrs, in)[0];
}

}  // namespace sheaf
