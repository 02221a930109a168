// Second derivatives of the gated delta rule. Its backward b(x, dout) is the gradient of <dout, f(x)>, so the gradient of <u, b> by x
// is the derivative of b along u (a Hessian is symmetric), and that by dout is the derivative of f: [Note: second derivatives]. Both
// follow from f and b written once, for whole sequences instead of chunks, in dual numbers (forward over reverse).
#include <optional>

#include "sheaf/autograd/ops/second.h"

namespace sheaf::ops {
namespace {

/// A value and its derivative along u, undefined where it is zero.
struct Dual {
  Tensor value, tangent = {};
  explicit operator bool() const { return value.defined(); }
};
Tensor times_or_none(const Tensor& a, const Tensor& b) { return a && b ? mul(a, b) : Tensor(); }

Dual operator+(const Dual& a, const Dual& b) {
  if (!a || !b) return a ? a : b;
  return {add(a.value, b.value), sum_of_defined({a.tangent, b.tangent})};
}
Dual operator-(const Dual& a) { return {neg(a.value), a.tangent ? neg(a.tangent) : Tensor()}; }
Dual operator-(const Dual& a, const Dual& b) { return b ? a + -b : a; }
Dual operator*(const Dual& a, const Dual& b) {
  return {mul(a.value, b.value), sum_of_defined({times_or_none(a.tangent, b.value), times_or_none(a.value, b.tangent)})};
}
Dual operator*(const Dual& a, double s) { return {mul(a.value, s), a.tangent ? mul(a.tangent, s) : Tensor()}; }
Dual product(const Dual& a, const Dual& b) {
  return {matmul(a.value, b.value), sum_of_defined({a.tangent ? matmul(a.tangent, b.value) : Tensor(),
                                                    b.tangent ? matmul(a.value, b.tangent) : Tensor()})};
}
/// f of both, for a linear f.
template <class F>
Dual linearly(const Dual& a, F&& f) {
  return a ? Dual{f(a.value), a.tangent ? f(a.tangent) : Tensor()} : Dual();
}
Dual transposed(const Dual& a) {
  return linearly(a, [](const Tensor& t) { return transpose(t, -1, -2); });
}
Dual summed(const Dual& a, const Dims& dims, bool keepdim = false) {
  return linearly(a, [&](const Tensor& t) { return sum(t, dims, keepdim); });
}
Dual column(const Dual& a) {
  return linearly(a, [](const Tensor& t) { return unsqueeze(t, {-1}); });
}
Dual row(const Dual& a) {
  return linearly(a, [](const Tensor& t) { return unsqueeze(t, {-2}); });
}
/// exp(a) where `seen`, else 0.
Dual exp_where(const Tensor& seen, const Dual& a) {
  const Tensor e = where(seen, exp(where(seen, a.value, 0.0)), 0.0);
  return {e, times_or_none(e, a.tangent)};
}
Dual last_of(const Dual& a) {
  return linearly(a, [](const Tensor& t) { return slice(t, -1, t.shape().back() - 1, t.shape().back()); });
}

/// x / sqrt(sum(x²) + eps), and its vjp.
struct Normed {
  Dual n, r;
  Normed(const Dual& x, double eps) : n(x) {
    if (eps == 0) return;
    const Dual squares = summed(x * x, {-1}, true);
    const Tensor inverse = rsqrt(add(squares.value, eps));
    r = {inverse, squares.tangent ? mul(mul(pow(inverse, 3.0), squares.tangent), -0.5) : Tensor()};
    n = x * r;
  }
  Dual backward(const Dual& g) const { return r ? (g - n * summed(g * n, {-1}, true)) * r : g; }
};

/// (1 + a)^-1 of a strictly lower triangular a of T rows: the product of 1 + m^(2^i), m = -a, which is finite as m is nilpotent.
Dual inverse_of_one_plus(const Dual& a, int64_t T, const Tensor& one) {
  Dual power = -a, out = power + Dual{one};
  for (int64_t reach = 2; reach < T; reach *= 2) {
    power = product(power, power);
    out = out + product(out, power);
  }
  return out;
}

/// Which pairs of tokens see each other, which tokens see the initial state, and which affect the final state.
struct Seen {
  Tensor pairs, earlier, initial, last, initial_by_last;
  Seen(const Tensor& begins_BT, int64_t T) {
    const Tensor j = unsqueeze(arange(T), {0}), i = unsqueeze(arange(T), {1});
    pairs = le(j, i), earlier = lt(j, i), initial = ge(arange(T), 0.0), last = initial, initial_by_last = ge(arange(1), 0.0);
    if (!begins_BT) return;
    const Tensor begins = unsqueeze(cast(begins_BT, kI64), {1, 2}), of_last = slice(begins, -1, T - 1, T);  // [B, 1, 1, T]
    const Tensor of_document = ge(j, unsqueeze(begins, {-1}));
    pairs = logical_and(pairs, of_document), earlier = logical_and(earlier, of_document);
    initial = le(begins, 0.0), last = ge(arange(T), of_last), initial_by_last = le(of_last, 0.0);
  }
};

}  // namespace

// All tensors are [B, G, H / G, T, ..], with 1 for H / G for queries and keys; formulas are named in kernels/delta_rule.h.
DeltaRuleSecond delta_rule_second(const DeltaRuleTensors& x, const DeltaRuleTensors& u, const Tensor& dout, const Tensor& dstate,
                                  const Tensor& begins, double scale, double norm_eps) {
  const DeviceScope device(x.q.device());
  const int64_t T = x.q.size(1), G = x.q.size(2), H = x.v.size(2);
  const auto heads = [&](const Tensor& t) {  // [B, T, heads, ..], or [B, T, heads]
    if (!t) return t;
    const Shape& s = t.shape();
    Shape split{s[0], s[1], G, s[2] / G};
    Dims order{0, 2, 3, 1};
    if (s.rank() == 4) split.push_back(s[3]), order.push_back(4);
    return permute(reshape(in_statistics_dtype(t), split), order);
  };
  const auto states = [&](const Tensor& t) {
    return t ? reshape(in_statistics_dtype(t), {t.size(0), G, H / G, t.size(2), t.size(3)}) : t;
  };
  const Seen seen(begins, T);
  const DType d = statistics_dtype(x.q.dtype());
  const Normed qn({heads(x.q), heads(u.q)}, norm_eps), kn({heads(x.k), heads(u.k)}, norm_eps);
  const Dual &q = qn.n, &k = kn.n, v{heads(x.v), heads(u.v)}, beta{heads(x.beta), heads(u.beta)}, s0{states(x.initial), states(u.initial)};
  const Dual sums = linearly({heads(x.decay), heads(u.decay)}, [](const Tensor& t) { return cumsum(t, -1); });
  const Dual between = column(sums) - row(sums), rate = column(beta);
  const Dual decays = exp_where(seen.pairs, between), earlier = exp_where(seen.earlier, between);
  const Dual from_first = s0 ? column(exp_where(seen.initial, sums)) : Dual();
  const Dual to_last = column(exp_where(seen.last, last_of(sums) - sums)), over_all = column(exp_where(seen.initial_by_last, last_of(sums)));

  // Forward.
  const Dual kk = product(k, transposed(k)) * earlier, A = rate * kk, P = product(q, transposed(k)) * decays * scale;
  const Dual N = inverse_of_one_plus(A, T, cast(eq(unsqueeze(arange(T), {0}), unsqueeze(arange(T), {1})), d));
  const Dual answered = s0 ? product(k, s0) * from_first : Dual(), missing = v - answered, U = product(N, rate * missing);
  const Dual asked = s0 ? product(q, s0) * from_first * scale : Dual(), out = product(P, U) + asked;
  const Dual written = product(transposed(k * to_last), U), state = s0 ? written + s0 * over_all : written;

  // Backward.
  const Dual g{heads(dout)}, gs{states(dstate)};
  Dual dU = product(transposed(P), g);
  if (gs) dU = dU + product(k * to_last, gs);
  const Dual X = product(transposed(N), dU), dA = -product(X, transposed(U)), dP = product(g, transposed(U));
  const Dual dkk = dA * rate * earlier, dqk = dP * decays * scale, by_pairs = dA * A + dP * P;
  Dual dq = product(dqk, k), dk = product(dkk + transposed(dkk), k) + product(transposed(dqk), q);
  Dual dsums = summed(by_pairs, {-1}) - summed(by_pairs, {-2}), ds0;
  const Dual dbeta = summed(X * missing, {-1}) + summed(dA * kk, {-1});
  if (s0) {
    const Dual Xb = rate * X;
    dq = dq + product(g, transposed(s0)) * from_first * scale, dk = dk - product(Xb, transposed(s0)) * from_first;
    dsums = dsums + summed(asked * g, {-1}) - summed(Xb * answered, {-1});
    ds0 = product(transposed(q * from_first), g) * scale - product(transposed(k * from_first), Xb);
  }
  if (gs) {
    const Dual back = product(U, transposed(gs)) * to_last, by_token = summed(back * k, {-1});
    dk = dk + back;
    Dual of_last = summed(by_token, {-1}, true);
    if (s0)
      ds0 = ds0 + gs * over_all,
      of_last = of_last + linearly(summed(s0 * gs, {-1, -2}, true) * over_all, [](const Tensor& t) { return squeeze(t, {-1}); });
    dsums = dsums - by_token + linearly(of_last, [&](const Tensor& t) { return pad(t, -1, T - 1, 0); });
  }
  const Dual ddecay = linearly(dsums, [](const Tensor& t) { return cumsum(t, -1, /*reverse=*/true); }), dv = rate * X;

  const auto by_tokens = [&](const Tensor& t) {  // back to [B, T, heads, ..]
    if (!t) return t;
    const bool rows = t.rank() == 5;
    const Tensor p = permute(t, rows ? Dims{0, 3, 1, 2, 4} : Dims{0, 3, 1, 2});
    const Shape& s = p.shape();
    return reshape(p, rows ? Shape{s[0], s[1], s[2] * s[3], s[4]} : Shape{s[0], s[1], s[2] * s[3]});
  };
  const auto of_heads = [&](const Dual& g) { return by_tokens(g.tangent ? g.tangent : full_of(g.value.type(), 0.0)); };
  const auto of_states = [&](const Tensor& t) { return t ? reshape(t, {t.size(0), H, t.size(3), t.size(4)}) : t; };
  return {.x = {.q = of_heads(qn.backward(summed(dq, {2}, true))),
                .k = of_heads(kn.backward(summed(dk, {2}, true))),
                .v = of_heads(dv),
                .decay = by_tokens(ddecay.tangent),
                .beta = by_tokens(dbeta.tangent),
                .initial = of_states(ds0.tangent)},
          .dout = by_tokens(out.tangent),
          .dstate = of_states(state.tangent)};
}

}  // namespace sheaf::ops
