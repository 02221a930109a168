// The gated delta rule in f64, token by token, by the formulas in kernels/delta_rule.h, and its gradients by the reverse recurrence.
#pragma once

#include <cmath>
#include <vector>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::testing {

/// Dense f64 arrays; those without memory are absent. begins holds i32.
struct DeltaRuleReference {
  Array q, k, v, decay, beta, initial, begins;
  double scale, norm_eps;

  struct Result {
    Array out, state;
  };
  struct Gradients {
    Array q, k, v, decay, beta, initial;
  };

  int64_t batch() const { return q.view().shape[0]; }
  int64_t tokens() const { return q.view().shape[1]; }
  int64_t key_heads() const { return q.view().shape[2]; }
  int64_t heads() const { return v.view().shape[2]; }
  int64_t width() const { return q.view().shape[3]; }
  int64_t of_values() const { return v.view().shape[3]; }

  Result forward() const { return run(nullptr, nullptr).first; }
  /// For gradients of the result and of the last state; the latter may be without memory.
  Gradients backward(const Array& dout, const Array& dstate) const { return run(&dout, &dstate).second; }

 private:
  using Vector = std::vector<double>;

  static const double* row(const Array& x, int64_t i, int64_t width) { return x.view().as<const double>() + i * width; }
  static double* row(Array& x, int64_t i, int64_t width) { return x.view().as<double>() + i * width; }
  static void clear(Array& x) { x.fill([](int64_t) { return 0.0; }); }

  /// Row i of x, normalised; `norm` is the factor.
  Vector normalised(const Array& x, int64_t i, double& norm) const {
    const double* from = row(x, i, width());
    double sum = 0;
    for (int64_t d = 0; d < width(); ++d) sum += from[d] * from[d];
    norm = norm_eps == 0 ? 1 : 1 / std::sqrt(sum + norm_eps);
    Vector out(from, from + width());
    for (double& y : out) y *= norm;
    return out;
  }
  /// Adds the gradient of a row whose normalised values y have the gradient dy.
  void add_normalised(Array& dx, int64_t i, const Vector& y, const Vector& dy, double norm) const {
    double dot = 0;
    for (int64_t d = 0; d < width(); ++d) dot += norm_eps == 0 ? 0 : y[d] * dy[d];
    for (int64_t d = 0; d < width(); ++d) row(dx, i, width())[d] += norm * (dy[d] - y[d] * dot);
  }

  std::pair<Result, Gradients> run(const Array* dout, const Array* dlast) const {
    const int64_t B = batch(), T = tokens(), H = heads(), G = key_heads(), D = width(), E = of_values();
    Result r{Array(kF64, {B, T, H, E}), Array(kF64, {B, H, D, E})};
    Gradients g{Array(kF64, q.view().shape), Array(kF64, q.view().shape), Array(kF64, v.view().shape), Array(kF64, {B, T, H}),
                Array(kF64, {B, T, H}), Array(kF64, {B, H, D, E})};
    for (Array* x : {&g.q, &g.k}) clear(*x);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h) {
        const auto at = [&](int64_t t) { return (b * T + t) * H + h; };
        const auto of_key = [&](int64_t t) { return (b * T + t) * G + h / (H / G); };
        const auto starts = [&](int64_t t) { return t > 0 && begins.bytes() > 0 && begins.at(b * T + t) == static_cast<double>(t); };
        std::vector<Vector> befores, behinds;  // states of each token
        Vector S(static_cast<size_t>(D * E), 0.0);
        if (initial.bytes() > 0) S.assign(row(initial, b * H + h, D * E), row(initial, b * H + h, D * E) + D * E);
        for (int64_t t = 0; t < T; ++t) {
          if (starts(t)) S.assign(S.size(), 0.0);
          befores.push_back(S);
          double norm;
          const Vector key = normalised(k, of_key(t), norm), query = normalised(q, of_key(t), norm);
          for (double& s : S) s *= std::exp(decay.at(at(t)));
          for (int64_t e = 0; e < E; ++e) {
            double answer = 0, result = 0;
            for (int64_t d = 0; d < D; ++d) answer += S[d * E + e] * key[d];
            const double u = beta.at(at(t)) * (row(v, at(t), E)[e] - answer);
            for (int64_t d = 0; d < D; ++d) S[d * E + e] += key[d] * u;
            for (int64_t d = 0; d < D; ++d) result += S[d * E + e] * query[d];
            row(r.out, at(t), E)[e] = scale * result;
          }
          behinds.push_back(S);
        }
        std::copy(S.begin(), S.end(), row(r.state, b * H + h, D * E));
        if (!dout) continue;

        Vector dS(static_cast<size_t>(D * E), 0.0);
        if (dlast->bytes() > 0) dS.assign(row(*dlast, b * H + h, D * E), row(*dlast, b * H + h, D * E) + D * E);
        for (int64_t t = T; t-- > 0;) {
          double q_norm, k_norm;
          const Vector key = normalised(k, of_key(t), k_norm), query = normalised(q, of_key(t), q_norm);
          const double rate = std::exp(decay.at(at(t))), share = beta.at(at(t));
          const Vector &before = befores[static_cast<size_t>(t)], &behind = behinds[static_cast<size_t>(t)];
          Vector dq(static_cast<size_t>(D), 0.0), dk = dq;
          double dbeta = 0, drate = 0;
          for (int64_t e = 0; e < E; ++e) {
            const double dy = scale * row(*dout, at(t), E)[e];
            double answer = 0, du = 0;
            for (int64_t d = 0; d < D; ++d) {
              dq[d] += dy * behind[d * E + e];
              dS[d * E + e] += dy * query[d];
              answer += rate * before[d * E + e] * key[d];
              du += dS[d * E + e] * key[d];
            }
            const double difference = row(v, at(t), E)[e] - answer, dv = share * du;
            dbeta += du * difference;
            row(g.v, at(t), E)[e] = dv;
            for (int64_t d = 0; d < D; ++d) {
              dk[d] += dS[d * E + e] * share * difference - rate * before[d * E + e] * dv;
              dS[d * E + e] -= key[d] * dv;
              drate += dS[d * E + e] * before[d * E + e];
              dS[d * E + e] *= rate;
            }
          }
          g.beta.set(at(t), dbeta), g.decay.set(at(t), rate * drate);
          add_normalised(g.q, of_key(t), query, dq, q_norm), add_normalised(g.k, of_key(t), key, dk, k_norm);
          if (starts(t)) dS.assign(dS.size(), 0.0);
        }
        std::copy(dS.begin(), dS.end(), row(g.initial, b * H + h, D * E));
      }
    return {r, g};
  }
};

}  // namespace sheaf::testing
