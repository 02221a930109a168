// Scaled dot-product attention, blocked; sizes are named in kernels/attention.h.
#include "sheaf/kernels/attention.h"

#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/autograd/ops/query_runs.h"
#include "sheaf/kernels/attention_sinks.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct AttentionAttrs {
  double scale;
  int64_t causal, window;
  double softcap;
};

/// The shard of heads that queries share with keys: a key head is on the rank of the query heads that read it. `of_queries` says
/// whether `map` is the queries'.
struct HeadCut {
  Placement queries, keys, lse, sinks;
};
std::optional<HeadCut> head_cut(const Place& p, const OwnershipMap& map, bool of_queries) {
  const int64_t group = p.shape(1)[2] > 0 ? p.shape(0)[2] / p.shape(1)[2] : 1;
  if (of_queries && !map.can_move(1, group)) return {};
  const OwnershipMap q = of_queries ? map : map.moved_to(2, group),
                     k = of_queries ? map.moved_to(2, 1, group) : map;
  return HeadCut{Placement::shard(q), Placement::shard(k), Placement::shard(q.moved_to(1)), Placement::shard(q.moved_to(0))};
}

/// The placement of input `begins`, where queries are cut: with them, if keys have documents of their own.
Placement begins_of_cut(const Place& p, int begins, const Placement& queries) {
  return p.num_inputs() > begins + 1 ? queries : kR;
}

/// q, k, v, out, dout, lse, sinks[H] if kSinks, begins and key_begins if there are documents -> dq, dk, dv, and if kSinks the queries'
/// contributions to dsinks, [B, H, T].
template <bool kSinks>
struct AttentionBackward {
  static constexpr const char* kName = kSinks ? "attention_with_sinks_backward" : "attention_backward";
  static constexpr PartDims kHeads = {{2, 2, 2, 2, 2, 1, kSinks ? 0 : -1, -1, -1}, {2, 2, 2, 1}};
  using Attrs = AttentionAttrs;
  static constexpr int kBegins = 6 + kSinks;
  static void infer(const Attrs&, Infer& c) {
    for (int i = 0; i < 3; ++i) c.output(c.dtype(i), c.shape(i));
    if (kSinks) c.output(c.dtype(5), c.shape(5));
  }
  static void place(const Attrs& a, Place& p) {
    const SinkRules rule{p, kSinks, /*backward=*/true};
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      const Placement& x = p.in(i);
      if (x.map().dim() == 0 && !(kSinks && i == 6))
        rule({x, x, x, x, x, x}, {x, x, x}, {.of_sinks = x, .begins = x, .key_begins = x});
      if (i == 0 && cuts_queries(p, p.in(0), a.causal)) {
        const Placement &q = p.in(0), lse = lse_of(q);
        rule({q, kR, kR, q, q, lse}, {q, kP, kP}, {.of_sinks = lse, .begins = begins_of_cut(p, kBegins, q)});
      }
      if (i >= 5 || x.map().dim() != 2) break;
      if (const auto cut = head_cut(p, x.map(), i == 0 || i > 2))
        rule({cut->queries, cut->keys, cut->keys, cut->queries, cut->queries, cut->lse},
             {cut->queries, cut->keys, cut->keys}, {.sinks = cut->sinks, .of_sinks = cut->lse});
      break;
    }
    rule({kR, kR, kR, kR, kR, kR}, {kR, kR, kR}, {});
    rule({kR, kR, kR, kR, kP, kR}, {kP, kP, kP}, {.of_sinks = kP});  // linear in dout
    rule({kR, kR, kP, kP, kR, kR}, {kP, kP, kR}, {.of_sinks = kP});  // and in v and out together
  }
  static AttentionBackwardCall call(const Attrs& a, const Execute& c) {
    return {c.input(0), c.input(1), c.input(2), c.input(3),  c.input(5), c.input(4),
            mask_of(a, c, kBegins), a.scale, c.output(0), c.output(1), c.output(2)};
  }
  static int64_t workspace(const Attrs& a, const Execute& c) { return call(a, c).workspace(c); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    call(a, c).run(c, stream, c.workspace);
    if constexpr (kSinks) SHEAF_ON_DEVICE(stream, attention_sinks_backward, c.input(6), c.input(3), c.input(5), c.input(4), c.output(3));
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_backward = backward_operations(w, a, w.input(0), w.input(3), w.input(1)[1], w.input(0)[3]);
  }
  static constexpr uint64_t kSavedInputs = kSinks ? 0b111010111 : 0b11010111;
  static void vjp(const Attrs& a, Vjp& c) {
    const AttentionBackwardOperands d =
        attention_second({c.input(0), c.input(1), c.input(2), c.input(4), kSinks ? c.input(6) : Tensor()},
                         {grad_if(true, c, 0), grad_if(true, c, 1), grad_if(true, c, 2), {}, grad_if(kSinks, c, 3)},
                         visible_keys(a, c, kBegins), a.scale);
    c.set(0, d.q);
    c.set(1, d.k);
    if (d.v) c.set(2, d.v);
    c.set(4, d.dout);
    if (kSinks) c.set(6, d.sinks);
  }
};

/// q[B, T, H, D], k[B, S, G, D], v[B, S, G, E], sinks[H] if kSinks, begins[B, T] if there are documents, key_begins[B, S] if keys have
/// their own -> out, lse[B, H, T].
template <bool kSinks>
struct Attention {
  static constexpr const char* kName = kSinks ? "attention_with_sinks" : "attention";
  static constexpr PartDims kHeads = {{2, 2, 2, kSinks ? 0 : -1, -1, -1}, {2, 1}};
  using Attrs = AttentionAttrs;
  static constexpr int kBegins = 3 + kSinks;
  static constexpr uint64_t kSavedInputs = kSinks ? 0b111111 : 0b11111, kSavedOutputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = common_dtype(kName, c, 0, 3);
    require_floating(kName, d);
    const Shape &q = c.shape(0), &k = c.shape(1), &v = c.shape(2);
    if (q.rank() != 4 || k.rank() != 4 || v.rank() != 4 || !(v == Shape{k[0], k[1], k[2], v[3]}) || q[0] != k[0] ||
        q[3] != k[3] || k[2] == 0 || q[2] % k[2] != 0)
      fail<ShapeError>("[", kName, "] wants q [B,T,H,D], k [B,S,G,D] and v [B,S,G,E] with H a multiple of G; got ",
                       c.input(0), ", ", c.input(1), " and ", c.input(2));
    if (kSinks) check_sinks(kName, c.input(3), q[2], d);
    check_begins(kName, c, kBegins, {q[0], q[1]}, a.causal, k[1]);
    c.output(d, {q[0], q[1], q[2], v[3]});
    c.output(statistics_dtype(d), {q[0], q[2], q[1]});
  }
  static void place(const Attrs& a, Place& p) {
    const SinkRules rule{p, kSinks, /*backward=*/false};
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      const Placement& x = p.in(i);
      if (x.map().dim() == 0 && !(kSinks && i == 3)) rule({x, x, x}, {x, x}, {.begins = x, .key_begins = x});
      if (i == 0 && cuts_queries(p, x, a.causal)) rule({x, kR, kR}, {x, lse_of(x)}, {.begins = begins_of_cut(p, kBegins, x)});
      if (x.map().dim() == 2)
        if (const auto cut = head_cut(p, x.map(), i == 0))
          rule({cut->queries, cut->keys, cut->keys}, {cut->queries, cut->lse}, {.sinks = cut->sinks});
      break;
    }
    rule({kR, kR, kR}, {kR, kR}, {});
    rule({kR, kR, kP}, {kP, kR}, {});  // linear in v
  }
  static AttentionCall call(const Attrs& a, const Execute& c) {
    return {c.input(0), c.input(1), c.input(2), c.output(0), c.output(1), mask_of(a, c, kBegins), a.scale};
  }
  static int64_t workspace(const Attrs& a, const Execute& c) { return call(a, c).workspace(c); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    call(a, c).run(c, stream, c.workspace);
    if constexpr (kSinks) SHEAF_ON_DEVICE(stream, attention_sinks, c.input(3), c.output(0), c.output(1));
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.work.attention_forward = forward_operations(w, a, w.input(0), w.output(0), w.input(1)[1], w.input(0)[3]);
  }
  static void vjp(const Attrs& a, Vjp& c) { set_gradients<AttentionBackward<kSinks>>(a, c, 3, kSinks); }
  static void describe(const Attrs& a, std::string& out) {
    out += str(describe_mask(a.causal, a.window, a.softcap), "scale ", a.scale);
  }
};

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  expect_all_defined("attention", {&q, &k, &v});
  if (q.rank() != 4) fail<ShapeError>("[attention] wants q [B,T,H,D], got ", q.type());
  check_mask("attention", options, /*own_keys=*/false);
  const AttentionAttrs attrs{scale_of(options, q.size(3)), options.causal, options.window, options.softcap};
  std::vector<Tensor> in = {dense_rows(q), dense_rows(k), dense_rows(v)};
  AttentionOptions all = options;
  if (options.key_begins && !options.begins) {
    const DeviceScope device(q.device());
    all.begins = zeros({q.size(0), q.size(1)}, kI32);
  }
  push_others(in, all, q.dtype());
  return apply(options.sinks ? op_def<Attention<true>>() : op_def<Attention<false>>(), &attrs, in)[0];
}

}  // namespace sheaf
