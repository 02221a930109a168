#include "sheaf/autograd/ops/second.h"

#include "sheaf/autograd/ops/linear.h"

namespace sheaf::ops {
namespace {

Tensor transposed(const Tensor& x) { return transpose(x, -1, -2); }

// x[B, T, H, D] as [B, G, H / G, T, D], and back.
Tensor by_groups(const Tensor& x, int64_t groups) {
  if (!x) return x;
  const Shape& s = x.shape();
  return permute(reshape(in_statistics_dtype(x), {s[0], s[1], groups, s[2] / groups, s[3]}), {0, 2, 3, 1, 4});
}
Tensor by_heads(const Tensor& x) {
  if (!x) return x;
  const Shape& s = x.shape();
  return reshape(permute(x, {0, 3, 1, 2, 4}), {s[0], s[3], s[1] * s[2], s[4]});
}

// Which of S keys each of T queries sees: bool [T, S], or [B, 1, 1, T, S] for documents; undefined: all.
Tensor mask_of(const VisibleKeys& visible, int64_t T, int64_t S) {
  if (!visible.causal) return visible.begins ? eq(unsqueeze(visible.begins, {1, 2, 4}), unsqueeze(visible.key_begins, {1, 2, 3})) : Tensor();
  const Tensor keys = unsqueeze(arange(S), {0}), queries = unsqueeze(arange(static_cast<double>(S - T), static_cast<double>(S), 1), {1});
  Tensor seen = le(keys, queries);
  if (visible.window) seen = logical_and(seen, gt(keys, sub(queries, static_cast<double>(visible.window))));
  if (visible.begins) seen = logical_and(seen, ge(keys, unsqueeze(cast(visible.begins, kI64), {1, 2, 4})));
  return seen;
}

// [H] as [1, G, H / G, 1, 1], and [B, H, T] as [B, G, H / G, T, 1].
Tensor sinks_by_groups(const Tensor& x, int64_t groups) {
  const Shape& s = x.shape();
  if (s.rank() == 1) return unsqueeze(reshape(x, {groups, s[0] / groups}), {0, 3, 4});
  return reshape(x, {s[0], groups, s[1] / groups, s[2], 1});
}

// Appends the sinks' column to the keys' columns, or zeros; returns `keys` if there are no sinks.
Tensor with_sinks(const Tensor& keys, const Tensor& of_sinks, bool sinks) {
  if (!sinks) return keys;
  Shape one = keys.shape();
  one[one.rank() - 1] = 1;
  const Tensor none = full_of({keys.dtype(), one, keys.layout()}, 0.0);
  return concat({keys, of_sinks ? add(none, of_sinks) : none}, -1);
}
Tensor of_keys(const Tensor& x, bool sinks) { return sinks ? slice(x, -1, 0, x.shape().back() - 1) : x; }

// A query that sees no key has probabilities of zero.
Tensor probabilities(const Tensor& scores, const Tensor& seen, const Tensor& sinks) {
  if (!seen) return softmax(with_sinks(scores, sinks, sinks.defined()));
  const Tensor p = softmax(with_sinks(where(seen, scores, -1e30), sinks, sinks.defined()));
  if (!sinks) return where(seen, p, 0.0);
  const auto parts = split(p, {scores.shape().back(), 1}, -1);
  return concat({where(seen, parts[0], 0.0), parts[1]}, -1);
}

// The derivative of softcap(), given its result.
Tensor slope_of_capped(const Tensor& y, double cap) { return add(mul(square(mul(y, 1 / cap)), -1.0), 1.0); }

// Columns [first, first + V) of one-hot rows.
Tensor one_hot(const Tensor& targets, int64_t first, int64_t V, DType dtype) {
  const auto begin = static_cast<double>(first);
  return cast(eq(unsqueeze(cast(targets, kI64), {-1}), arange(begin, begin + static_cast<double>(V), 1)), dtype);
}

// The inputs of the losses of rows of logits, and of the gradients of the logits.
struct Rows {
  Tensor dlse, dtarget;  // of each row, [.., 1] or []; 0 where the target is ignored
  Tensor counts, p, is_target;
  Rows(const Tensor& logits, const Tensor& dlse_of, const Tensor& dtarget_of, const Tensor& targets, int64_t ignore_index,
       int64_t first_row)
      : counts(cast(ne(unsqueeze(cast(targets, kI64), {-1}), static_cast<double>(ignore_index)), logits.dtype())),
        p(softmax(logits)),
        is_target(mul(counts, one_hot(targets, first_row, logits.shape().back(), logits.dtype()))) {
    const auto of_rows = [](const Tensor& g) { return g.rank() == 0 ? g : unsqueeze(g, {-1}); };
    dlse = mul(of_rows(dlse_of), counts), dtarget = of_rows(dtarget_of);
  }
  Tensor gradient() const { return add(mul(p, dlse), mul(is_target, dtarget)); }
};

Tensor sum_like(const Tensor& rows, const Tensor& like) { return like.rank() == 0 ? sum(rows) : rows; }

// For the tangent u of the logits.
LogitsBackwardOperands second_of(const Rows& rows, const Tensor& u, const Tensor& dlse, const Tensor& dtarget) {
  const Tensor lse = squeeze(mul(rows.counts, sum(mul(rows.p, u), {-1}, true)), {-1}), target = sum(mul(rows.is_target, u), {-1});
  return {mul(through_softmax(rows.p, u), rows.dlse), sum_like(lse, dlse), sum_like(target, dtarget)};
}

}  // namespace

Tensor sum_of_defined(std::initializer_list<Tensor> terms) {
  Tensor out;
  for (const Tensor& t : terms)
    if (t) out = out ? add(out, t) : t;
  return out;
}

// With P = softmax(S), S = scale Q Kᵀ, out = P V, and a dot for tangents along u:
//   dS = P(dP), the derivative of softmax, with dP = dout Vᵀ, dQ = scale dS K, dK = scale dSᵀ Q, dV = Pᵀ dout
//   <u, (dQ, dK, dV)> = <dout, Ṗ V + P U_V>, Ṗ = P(Ṡ), Ṡ = scale (U_Q Kᵀ + Q U_Kᵀ)
// With a softcap C, S = C tanh(R / C) of R = scale Q Kᵀ, and m = 1 - (S / C)² its derivative: dR = m dS in place of dS, and Ṡ = m Ṙ,
// so that R also gets <dS m', Ṙ>, m' = -2 S / C² m.
// A sink is one more column of S, which is given, and whose value is zero; its column of dS is its gradient, and that of Ṡ its U.
AttentionBackwardOperands attention_second(const AttentionBackwardOperands& x, const AttentionBackwardOperands& u,
                                           const VisibleKeys& visible, double scale) {
  const DeviceScope device(x.q.device());
  const int64_t groups = x.k.size(2);
  const Tensor q = by_groups(x.q, groups), k = by_groups(x.k, groups), v = by_groups(x.v, groups), dout = by_groups(x.dout, groups);
  const Tensor uq = by_groups(u.q, groups), uk = by_groups(u.k, groups), uv = by_groups(u.v, groups);

  const bool sinks = x.sinks.defined();
  const auto keys = [&](const Tensor& t) { return of_keys(t, sinks); };
  const double cap = visible.softcap;
  Tensor scores = mul(matmul(q, transposed(k)), scale), slope;
  if (cap != 0) scores = softcap(scores, cap), slope = slope_of_capped(scores, cap);
  const auto of_products = [&](const Tensor& of_scores) { return slope ? mul(of_scores, slope) : of_scores; };
  const Tensor p = probabilities(scores, mask_of(visible, x.q.size(1), x.k.size(1)), sinks ? sinks_by_groups(x.sinks, groups) : Tensor());
  const Tensor dp = with_sinks(matmul(dout, transposed(v)), {}, sinks), us = u.sinks ? sinks_by_groups(u.sinks, groups) : Tensor();
  Tensor tangent_s = sum_of_defined({uq ? mul(matmul(uq, transposed(k)), scale) : Tensor(),
                                     uk ? mul(matmul(q, transposed(uk)), scale) : Tensor()});
  Tensor of_slope;  // what the products get through the slope in the tangent
  if (slope && tangent_s) {
    of_slope = mul(mul(mul(keys(through_softmax(p, dp)), tangent_s), mul(scores, slope)), -2 / (cap * cap));
    tangent_s = of_products(tangent_s);
  }
  if (us && !tangent_s) tangent_s = full_of(scores.type(), 0.0);
  if (tangent_s) tangent_s = with_sinks(tangent_s, us, sinks);
  Tensor of_p, gq, gk, gv, gout;
  if (tangent_s) {
    const Tensor tangent_p = through_softmax(p, tangent_s), ds = mul(through_softmax(p, dp), scale);
    gout = matmul(keys(tangent_p), v);
    gv = matmul(transposed(keys(tangent_p)), dout);
    if (uk) gq = matmul(of_products(keys(ds)), uk);
    if (uq) gk = matmul(transposed(of_products(keys(ds))), uq);
    // of <tangent_p, dp> by the probabilities in it
    of_p = sub(mul(tangent_s, dp), add(mul(sum(mul(p, tangent_s), {-1}, true), dp), mul(sum(mul(p, dp), {-1}, true), tangent_s)));
  }
  if (uv) {
    gout = sum_of_defined({gout, matmul(keys(p), uv)});
    of_p = sum_of_defined({of_p, with_sinks(matmul(dout, transposed(uv)), {}, sinks)});
  }
  const Tensor of_all = through_softmax(p, of_p), of_s = mul(sum_of_defined({of_products(keys(of_all)), of_slope}), scale);
  const Tensor of_sinks = sinks ? sum(slice(of_all, -1, scores.shape().back(), scores.shape().back() + 1), {0, 3, 4}) : Tensor();
  gq = sum_of_defined({gq, matmul(of_s, k)});
  gk = sum_of_defined({gk, matmul(transposed(of_s), q)});
  const auto of_key_heads = [](const Tensor& g) { return g ? by_heads(sum(g, {2}, true)) : g; };  // all queries that read one
  return {by_heads(gq), of_key_heads(gk), of_key_heads(gv), by_heads(gout), sinks ? reshape(of_sinks, x.sinks.shape()) : Tensor()};
}

// With n for the normalised x before the weight, r = 1 / sqrt(variance + eps), g = dy weight and J for the derivative of n, which is
// symmetric: dx = J(g), dweight = Σ dy n, dbias = Σ dy, so that <u, ..> = <g, J(u_x)> + <dy, n u_w + u_b>.
NormBackwardOperands norm_second(const NormBackwardOperands& x, const NormGradients& u, bool layer, double eps) {
  const Tensor in = in_statistics_dtype(x.x), dy = in_statistics_dtype(x.dy);
  const Tensor centered = layer ? sub(in, mean(in, {-1}, true)) : in;
  const Tensor r = rsqrt(add(mean(square(centered), {-1}, true), eps)), n = mul(centered, r);
  const auto along = [&](const Tensor& g) { return mean(mul(g, n), {-1}, true); };
  const auto J = [&](const Tensor& g) {
    const Tensor level = layer ? sub(g, mean(g, {-1}, true)) : g;
    return mul(sub(level, mul(n, along(g))), r);
  };
  NormBackwardOperands out;
  Tensor of_n, of_r;  // gradients of n, and of r where J multiplies by it, propagated to x
  if (u.dx) {
    const Tensor ux = in_statistics_dtype(u.dx), tangent = J(ux);
    const Tensor weight = x.weight ? in_statistics_dtype(x.weight) : Tensor(), g = weight ? mul(dy, weight) : dy;
    out.dy = weight ? mul(tangent, weight) : tangent;
    if (weight) {
      const Tensor products = mul(dy, tangent);
      Dims rows;
      for (int d = 0; d < in.rank() - weight.rank(); ++d) rows.push_back(d);
      out.weight = rows.empty() ? products : sum(products, rows);
    }
    of_n = neg(mul(add(mul(g, along(ux)), mul(ux, along(g))), r));
    of_r = neg(mul(mul(mean(mul(g, tangent), {-1}, true), n), r));
  }
  if (u.dweight) {
    const Tensor uw = in_statistics_dtype(u.dweight);
    out.dy = sum_of_defined({out.dy, mul(n, uw)});
    of_n = sum_of_defined({of_n, mul(dy, uw)});
  }
  if (u.dbias) out.dy = out.dy ? add(out.dy, u.dbias) : expand(u.dbias, in.shape());
  out.x = sum_of_defined({of_n ? J(of_n) : Tensor(), of_r});
  return out;
}

LogitsBackwardOperands logits_second(const LogitsBackwardOperands& x, const Tensor& u, const Tensor& targets, int64_t ignore_index) {
  const DeviceScope device(x.logits.device());
  const Rows rows(in_statistics_dtype(x.logits), x.dlse, x.dtarget, targets, ignore_index, /*first_row=*/0);
  return second_of(rows, in_statistics_dtype(u), x.dlse, x.dtarget);
}

HeadBackwardOperands head_second(const HeadBackwardOperands& x, const HeadBackwardOperands& u, const Tensor& targets,
                                 const kernels::HeadRules& rules, int64_t first_row) {
  const DeviceScope device(x.x.device());
  const Tensor in = in_statistics_dtype(x.x), weight = in_statistics_dtype(x.weight);
  const Tensor ux = u.x ? in_statistics_dtype(u.x) : Tensor(), uw = u.weight ? in_statistics_dtype(u.weight) : Tensor();
  const double cap = rules.softcap;
  const Tensor logits = cap != 0 ? softcap(linear(in, weight), cap) : linear(in, weight);
  const Rows rows(logits, x.dlse, x.dtarget, targets, rules.ignore_index, first_row);
  const Tensor tangent = sum_of_defined({ux ? linear(ux, weight) : Tensor(), uw ? linear(in, uw) : Tensor()});
  Tensor g = rows.gradient(), of_logits;
  LogitsBackwardOperands of;
  if (cap == 0) {
    of = second_of(rows, tangent, x.dlse, x.dtarget);
    of_logits = of.logits;
  } else {  // as of scores in attention_second()
    const Tensor slope = slope_of_capped(logits, cap);
    of = second_of(rows, mul(tangent, slope), x.dlse, x.dtarget);
    of_logits = add(mul(of.logits, slope), mul(mul(mul(g, tangent), mul(logits, slope)), -2 / (cap * cap)));
    g = mul(g, slope);
  }
  return {sum_of_defined({times(of_logits, weight), uw ? times(g, uw) : Tensor()}),
          sum_of_defined({weight_gradient(of_logits, in), ux ? weight_gradient(g, ux) : Tensor()}), of.dlse, of.dtarget};
}

}  // namespace sheaf::ops
