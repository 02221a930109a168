// Scaled dot-product attention, blocked; sizes are named in kernels/attention.h.
#include "sheaf/kernels/attention.h"

#include <cmath>
#include <optional>

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct AttentionAttrs {
  double scale;
  int64_t causal;
};

/// The cut of heads that queries share with keys: a key head goes with the query heads that read it. `of_queries` tells
/// whose cut `map` is.
struct HeadCut {
  Placement queries, keys, lse;
};
std::optional<HeadCut> head_cut(const Place& p, const OwnershipMap& map, bool of_queries) {
  const int64_t group = p.shape(1)[2] > 0 ? p.shape(0)[2] / p.shape(1)[2] : 1;
  if (of_queries && map.granule() % group != 0) return {};
  const OwnershipMap q = of_queries ? map : map.moved_to(2, group), k = of_queries ? map.moved_to(2, 1, group) : map;
  return HeadCut{Placement::shard(q), Placement::shard(k), Placement::shard(q.moved_to(1))};
}

struct AttentionBackward {  // q, k, v, out, dout, lse -> dq, dk, dv
  static constexpr const char* kName = "attention_backward";
  using Attrs = AttentionAttrs;
  static void infer(const Attrs&, Infer& c) {
    for (int i = 0; i < 3; ++i) c.output(c.dtype(i), c.shape(i));
  }
  static void place(const Attrs&, Place& p) {
    for (int i = 0; i < 6; ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (p.in(i).map().dim() == 0) rule_all(p, p.in(i), p.in(i), 3);
      if (i == 5 || p.in(i).map().dim() != 2) break;
      if (const auto cut = head_cut(p, p.in(i).map(), i == 0 || i > 2))
        p.rule({cut->queries, cut->keys, cut->keys, cut->queries, cut->queries, cut->lse},
               {cut->queries, cut->keys, cut->keys});
      break;
    }
    rule_all(p, kR, kR, 3);
    p.rule({kR, kR, kR, kR, kP, kR}, {kP, kP, kP});  // linear in dout
    p.rule({kR, kR, kP, kP, kR, kR}, {kP, kP, kR});  // and in v and out together
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return static_cast<int64_t>(kernels::cpu::attention_backward_workspace(c.input(0), c.input(1)));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_CPU(c.stream(), attention_backward, c.input(0), c.input(1), c.input(2), c.input(3),
                 c.input(5), c.input(4), a.causal != 0, a.scale, c.output(0), c.output(1),
                 c.output(2), c.workspace);
  }
};

struct Attention {  // q[B, T, H, D], k[B, S, G, D], v -> out, lse[B, H, T]
  static constexpr const char* kName = "attention";
  using Attrs = AttentionAttrs;
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b11;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    const Shape &q = c.shape(0), &k = c.shape(1);
    if (q.rank() != 4 || k.rank() != 4 || !(k == c.shape(2)) || q[0] != k[0] || q[3] != k[3] || k[2] == 0 ||
        q[2] % k[2] != 0)
      fail<ShapeError>("[", kName, "] wants q [B,T,H,D], k and v [B,S,G,D] with H a multiple of G; got ",
                       c.input(0), ", ", c.input(1), " and ", c.input(2));
    c.output(d, q);
    c.output(statistics_dtype(d), {q[0], q[2], q[1]});
  }
  static void place(const Attrs&, Place& p) {
    for (int i = 0; i < 3; ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (p.in(i).map().dim() == 0) rule_all(p, p.in(i), p.in(i), 2);
      if (p.in(i).map().dim() == 2)
        if (const auto cut = head_cut(p, p.in(i).map(), i == 0))
          p.rule({cut->queries, cut->keys, cut->keys}, {cut->queries, cut->lse});
      break;
    }
    rule_all(p, kR, kR, 2);
    p.rule({kR, kR, kP}, {kP, kR});  // linear in v
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return static_cast<int64_t>(kernels::cpu::attention_workspace(c.input(0), c.input(1)));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_CPU(c.stream(), attention, c.input(0), c.input(1), c.input(2), a.causal != 0, a.scale,
                 c.output(0), c.output(1), c.workspace);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const auto d = apply_all<AttentionBackward>(
        a, {c.input(0), c.input(1), c.input(2), c.output(0), dense_rows(c.grad()), c.output(1)});
    for (int i = 0; i < 3; ++i) c.set(i, d[static_cast<size_t>(i)]);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str(a.causal ? "causal " : "", "scale ", a.scale);
  }
};

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  if (q.rank() != 4) fail<ShapeError>("[attention] wants q [B,T,H,D], got ", q.type());
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, q.size(3))));
  return apply_all<Attention>({scale, options.causal}, {dense_rows(q), dense_rows(k), dense_rows(v)})[0];
}

}  // namespace sheaf
