// Attention whose keys and values come from a narrow latent (multi-head latent attention): part of a key's elements are its head's
// own, the rest are shared by all heads. Whole keys are assembled in scratch memory, again in the backward.
//
//   B batch   T tokens   H heads   D width of queries and keys   N of it each head's own   E width of values
#include <optional>
#include <tuple>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/autograd/ops/query_runs.h"
#include "sheaf/autograd/ops/scratch.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/reduce.h"

namespace sheaf {
namespace {

using namespace ops;

struct LatentAttrs {
  double scale;
  int64_t causal, window;
  int32_t heads, width, own, values;  ///< width: D; own: N; values: E
};

/// The attributes for this rank's heads, input 0 being q.
LatentAttrs local_heads(LatentAttrs a, const Execute& c) {
  a.heads = static_cast<int32_t>(local_share(a.heads, c.input(0).shape[2], c.input_type(0).shape[2]));
  return a;
}

/// A shard of the heads in equal units.
struct LatentCut {
  Placement q, up, out, lse;
};
std::optional<LatentCut> latent_cut(const LatentAttrs& a, const Shape& q, int64_t units, const Placement& like) {
  if (units <= 0 || a.heads % units != 0 || q[2] == 0) return {};
  const auto cut = [&](int dim, int64_t size) { return shard_like(like, OwnershipMap::even(dim, size / units)); };
  return LatentCut{cut(2, q[2]), cut(2, int64_t{a.heads} * (a.own + a.values)), cut(2, int64_t{a.heads} * a.values), cut(1, a.heads)};
}

/// Views of operands by heads, [B, T, H, ..]. Whole keys are a dense block in scratch memory.
struct Heads {
  View q, own, v, shared, out;
  Heads(const LatentAttrs& a, const View& packed_q, const View& up, const View& shared_rows, const View& packed_out)
      : q(kernels::heads_of(packed_q, 0, a.heads, a.width)),
        own(kernels::heads_of(up, 0, a.heads, a.own + a.values)),
        v(own),
        shared(kernels::heads_of(shared_rows, 0, 1, shared_rows.shape[2])),
        out(kernels::heads_of(packed_out, 0, a.heads, a.values)) {
    own = elements(own, 0, a.own), v = elements(v, a.own, a.own + a.values);
  }
  /// Elements [begin, end) of each head.
  static View elements(View x, int64_t begin, int64_t end) {
    x.shape[3] = end - begin;
    if (x.data) x.data = x.as<char>() + static_cast<size_t>(begin) * size_of(x.dtype);
    return x;
  }
  View keys() const { return View::dense(nullptr, q.dtype, {own.shape[0], own.shape[1], own.shape[2], q.shape[3]}); }
  View own_of(const View& k) const { return elements(k, 0, own.shape[3]); }
  View shared_of(const View& k) const { return elements(k, own.shape[3], k.shape[3]); }
};

void put_keys_together(const Stream& stream, const Heads& h, const View& k) {
  SHEAF_ON_DEVICE(stream, copy, h.own, h.own_of(k));
  SHEAF_ON_DEVICE(stream, copy, expand_view(h.shared, h.shared_of(k).shape), h.shared_of(k));
}

struct LatentAttentionBackward {  // q, up, shared, out, dout, lse, begins if there are documents -> dq, dup, dshared
  static constexpr const char* kName = "latent_attention_backward";
  using Attrs = LatentAttrs;
  static void infer(const Attrs&, Infer& c) {
    for (int i = 0; i < 3; ++i) c.output(c.dtype(i), c.shape(i));
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard()) continue;
      if (p.in(i).is_shard(0)) rule_all(p, p.in(i), p.in(i), 3);
      if (i == 0 && cuts_queries(p, p.in(0), a.causal))
        rule_of(p, {p.in(0), kR, kR, p.in(0), p.in(0), lse_of(p.in(0))}, {p.in(0), kP, kP});
      const int64_t units = i == 5 ? even_units(p.in(5), 1, a.heads) : i == 2 ? 0 : even_units(p.in(i), 2, p.shape(i)[2]);
      if (const auto cut = latent_cut(a, p.shape(0), units, p.in(i)))
        rule_of(p, {cut->q, cut->up, kR, cut->out, cut->out, cut->lse}, {cut->q, cut->up, kP});
      break;
    }
    rule_all(p, kR, kR, 3);
    rule_of(p, {kR, kR, kR, kR, kP, kR}, {kP, kP, kP});  // linear in dout
  }
  static Heads operands(const Attrs& a, const Execute& c) { return {a, c.input(0), c.input(1), c.input(2), c.input(3)}; }
  static Heads gradients(const Attrs& a, const Execute& c) { return {a, c.output(0), c.output(1), c.output(2), c.input(4)}; }
  static AttentionBackwardCall call(const Attrs& a, const Execute& c, const Heads& h, const View& k, const Heads& d, const View& dk) {
    return {h.q, k, h.v, h.out, c.input(5), d.out, mask_of(a, c, 6), a.scale, d.q, dk, d.v};
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const Heads h = operands(a, c), d = gradients(a, c);
    const View k = h.keys(), dk = d.keys();
    const int64_t attention = call(a, c, h, k, d, dk).workspace(c),
                  sums = SHEAF_GPU_WORKSPACE(c.device(), sum, d.shared_of(dk), d.shared);
    return 2 * block_bytes(k) + std::max(attention, sums);
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const Heads h = operands(a, c), d = gradients(a, c);
    Workspace rest = c.workspace;
    const View k = take_block(kName, rest, h.keys()), dk = take_block(kName, rest, d.keys());
    put_keys_together(stream, h, k);
    call(a, c, h, k, d, dk).run(c, stream, rest);
    SHEAF_ON_DEVICE(stream, copy, d.own_of(dk), d.own);
    SHEAF_ON_DEVICE_SCRATCH(stream, rest, sum, d.shared_of(dk), d.shared, 1.0);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_backward = backward_operations(w, a, w.input(0), w.input(3), w.input(1)[1], a.width);
  }
  static constexpr uint64_t kSavedInputs = 0b1010111;
  static void vjp(const Attrs& a, Vjp& c) {
    const int64_t B = c.input_type(0).shape[0], T = c.input_type(0).shape[1], rest = a.width - a.own;
    const auto by_heads = [&](const Tensor& x, int64_t width) { return reshape(x, {B, T, a.heads, width}); };
    // From up and the shared elements: whole keys, and values.
    const auto keys_values = [&](const Tensor& up, const Tensor& shared) {
      const auto parts = split(by_heads(up, a.own + a.values), {a.own, a.values}, 3);
      return std::pair(concat({parts[0], expand(unsqueeze(shared, {2}), {B, T, a.heads, rest})}, 3), parts[1]);
    };
    const auto [k, v] = keys_values(c.input(1), c.input(2));
    AttentionBackwardOperands u;
    if (c.has_grad(0)) u.q = by_heads(c.grad(), a.width);
    if (c.has_grad(1) || c.has_grad(2)) {
      const auto or_zeros = [&](int o) { return c.has_grad(o) ? c.grad(o) : full_of(c.output_type(o).dual(), 0.0); };
      std::tie(u.k, u.v) = keys_values(or_zeros(1), or_zeros(2));
    }
    const AttentionBackwardOperands d =
        attention_second({by_heads(c.input(0), a.width), k, v, by_heads(c.input(4), a.values)}, u, visible_keys(a, c, 6), a.scale);
    const auto packed = [&](const Tensor& x_BTHD) { return reshape(x_BTHD, {B, T, a.heads * x_BTHD.size(3)}); };
    c.set(0, packed(d.q));
    if (d.v) {
      const auto parts = split(d.k, {a.own, rest}, 3);
      c.set(1, packed(concat({parts[0], d.v}, 3)));
      c.set(2, sum(parts[1], {2}));
    }
    c.set(4, packed(d.dout));
  }
};

struct LatentAttention {  // q, up, shared, begins[B, T] if there are documents -> out[B, T, H E], lse[B, H, T]
  static constexpr const char* kName = "latent_attention";
  using Attrs = LatentAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111, kSavedOutputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, common_dtype(kName, c, 0, 3));
    const Shape& q = c.shape(0);
    check_begins(kName, c, 3, {q[0], q[1]}, a.causal, c.shape(1)[1]);
    c.output(c.dtype(0), {q[0], q[1], int64_t{a.heads} * a.values});
    c.output(statistics_dtype(c.dtype(0)), {q[0], a.heads, q[1]});
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard()) continue;
      if (p.in(i).is_shard(0)) rule_all(p, p.in(i), p.in(i), 2);
      if (i == 0 && cuts_queries(p, p.in(0), a.causal)) rule_of(p, {p.in(0), kR, kR}, {p.in(0), lse_of(p.in(0))});
      const int64_t units = i < 2 ? even_units(p.in(i), 2, p.shape(i)[2]) : 0;
      if (const auto cut = latent_cut(a, p.shape(0), units, p.in(i))) rule_of(p, {cut->q, cut->up, kR}, {cut->out, cut->lse});
      break;
    }
    rule_all(p, kR, kR, 2);
  }
  static Heads operands(const Attrs& a, const Execute& c) { return {a, c.input(0), c.input(1), c.input(2), c.output(0)}; }
  static AttentionCall call(const Attrs& a, const Execute& c, const Heads& h, const View& k) {
    return {h.q, k, h.v, h.out, c.output(1), mask_of(a, c, 3), a.scale};
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const Heads h = operands(a, c);
    const View k = h.keys();
    return block_bytes(k) + call(a, c, h, k).workspace(c);
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const Heads h = operands(a, c);
    Workspace rest = c.workspace;
    const View k = take_block(kName, rest, h.keys());
    put_keys_together(stream, h, k);
    call(a, c, h, k).run(c, stream, rest);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_forward = forward_operations(w, a, w.input(0), w.output(0), w.input(1)[1], a.width);
  }
  static void vjp(const Attrs& a, Vjp& c) { set_gradients<LatentAttentionBackward>(a, c, 3, /*sinks=*/false); }
  static void describe(const Attrs& a, std::string& out) {
    out += str(describe_mask(a.causal, a.window), "heads ", a.heads, " own ", a.own, " scale ", a.scale);
  }
};

}  // namespace

Tensor latent_attention(const Tensor& q, const Tensor& up, const Tensor& shared, int64_t heads, const AttentionOptions& options) {
  expect_all_defined("latent_attention", {&q, &up, &shared});
  const auto refuse = [&] {
    fail<ShapeError>("[latent_attention] wants q [B, T, H D], up [B, T, H (N + E)] and shared [B, T, D - N], got ", q.type(), ", ",
                     up.type(), " and ", shared.type(), ", H ", heads);
  };
  if (q.rank() != 3 || up.rank() != 3 || shared.rank() != 3 || heads <= 0 || q.size(2) % heads != 0 || up.size(2) % heads != 0) refuse();
  const int64_t width = q.size(2) / heads, own = width - shared.size(2), values = up.size(2) / heads - own;
  for (int d = 0; d < 2; ++d)
    if (up.size(d) != q.size(d) || shared.size(d) != q.size(d)) refuse();
  if (own < 0 || values < 0) refuse();
  check_mask("latent_attention", options);
  if (options.softcap != 0) fail<ConfigError>("[latent_attention] has no softcap of scores, and options.softcap is ", options.softcap);
  check<ShapeError>(!options.sinks, "[latent_attention] takes no sinks");
  const LatentAttrs attrs{scale_of(options, width),    options.causal,           options.window,
                          static_cast<int32_t>(heads), static_cast<int32_t>(width), static_cast<int32_t>(own),
                          static_cast<int32_t>(values)};
  std::vector<Tensor> in = {dense_rows(q), dense_rows(up), dense_rows(shared)};
  if (options.begins) in.push_back(dense_rows(options.begins));
  return apply(op_def<LatentAttention>(), &attrs, in)[0];
}

}  // namespace sheaf
