// Gradients of the gated delta rule, compiled twice. With G the gradient of a chunk's results, dS that of the state behind it, and X that of
// what tokens write before it is solved for:
//
//   dU = Pᵀ G + Λ_last K dS     (1 + A)ᵀ X = dU     dA = -X Uᵀ (j < i)     dP = G Uᵀ (j <= i)
//
// Everything else follows from these by products. Of the sums of decays c, in whose differences all of it depends on them, c_i has
// +, c_j - what a pair has.
#include <vector>

#include "sheaf/kernels/cpu/delta_rule_chunk.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

struct Run {
  int64_t first, count;
};

template <class T, class C = ComputeType<T>>
class Backward {
 public:
  Backward(const DeltaRuleOperands& x, const DeltaRuleOptions& o, const View& dout, const View& dstate, const DeltaRuleGradients& d, C* cells)
      : x_(x), dout_(dout), dstate_(dstate), d_(d), s_(x), scratch_{cells}, keys_(x, o, scratch_), chunk_(x, scratch_) {
    const int64_t keys = keys_.columns, values = chunk_.columns;
    states_ = scratch_.take(s_.readers() * (s_.chunks() + 2) * s_.state());
    for (C** rows : {&g_, &g_first_, &x_first_, &u_last_, &dx_}) *rows = scratch_.take(L * values);
    for (C** rows : {&dq_, &dk_, &by_state_}) *rows = scratch_.take(L * keys);
    for (C** pairs : {&p_, &da_, &dp_, &dqk_}) *pairs = scratch_.take(L * L);
    dkk_ = scratch_.take(L * L);
    u_t_ = scratch_.take(values * L), state_t_ = scratch_.take(values * keys);
    dsums_ = scratch_.take(L), columns_ = scratch_.take(L), dbeta_ = scratch_.take(L);
  }

  void run(int64_t b, int64_t g) {
    const int64_t readers = s_.readers();
    runs_.clear();
    for_runs(x_.begins, b, s_.tokens, L, [&](int64_t first, int64_t count) { runs_.push_back({first, count}); });
    for (int64_t r = 0; r < readers; ++r) keep_states(b, g, r);
    for (int64_t r = 0; r < readers; ++r)
      if (given(dstate_)) load_state(s_, dstate_, b, g * readers + r, zeroed(dstate(r)));
    bool later = given(dstate_);  // dstate(r) is the gradient of the state behind the run
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
      const bool earlier = !is_fresh(b, run->first);
      keys_.load(b, run->first, run->count, g);
      for (C* rows : {dq_, dk_}) std::fill_n(rows, L * keys_.columns, C(0));
      for (C* pairs : {dqk_, dkk_}) std::fill_n(pairs, L * L, C(0));
      for (int64_t r = 0; r < readers; ++r) of_head(b, g, r, *run, earlier, later);
      of_keys(b, g, *run);
      later = earlier;
    }
    if (!given(d_.initial)) return;
    for (int64_t r = 0; r < readers; ++r) store_state(s_, later ? dstate(r) : zeroed(dstate(r)), b, g * readers + r, d_.initial);
  }

 private:
  C* zeroed(C* state) const {
    std::fill_n(state, s_.state(), C(0));
    return state;
  }
  /// Before the chunk that begins at token `first`; a document's first chunk has none.
  C* state(int64_t r, int64_t first) { return states_ + (r * (s_.chunks() + 2) + first / L) * s_.state(); }
  C* dstate(int64_t r) { return state(r, s_.chunks() * L); }
  C* current(int64_t r) { return state(r, (s_.chunks() + 1) * L); }
  bool is_fresh(int64_t b, int64_t first) const {
    return first == 0 ? !given(x_.initial) && !given(d_.initial) : begins_at(x_.begins, b, first);
  }

  void keep_states(int64_t b, int64_t g, int64_t r) {
    const int64_t h = g * s_.readers() + r;
    C* now = zeroed(current(r));
    if (given(x_.initial)) load_state(s_, x_.initial, b, h, now);
    for (size_t i = 0; i < runs_.size(); ++i) {
      const auto [first, count] = runs_[i];
      const bool fresh = is_fresh(b, first);
      if (!fresh) std::copy_n(now, s_.state(), state(r, first));
      if (i + 1 == runs_.size() || is_fresh(b, first + count)) continue;
      keys_.load(b, first, count, g);
      chunk_.write(keys_, fresh ? nullptr : now, b, first, count, h);
      chunk_.advance(keys_, fresh, count, now, u_last_);
    }
  }

  void of_head(int64_t b, int64_t g, int64_t r, const Run& run, bool earlier, bool later) {
    const int64_t h = g * s_.readers() + r, n = run.count, values = chunk_.columns, keys = keys_.columns, width = keys_.width;
    const C* before = earlier ? state(r, run.first) : nullptr;
    C* ds = dstate(r);
    chunk_.write(keys_, before, b, run.first, n, h);
    std::fill(chunk_.u + n * values, chunk_.u + L * values, C(0));
    transposed(chunk_.u, L, values, u_t_);
    for (int64_t i = 0; i < n; ++i) {
      load_row(row_of<const T>(dout_, b, run.first + i, h), chunk_.width, g_ + i * values);
      Chunk<T, C>::multiply(chunk_.decays + i * L, keys_.qk + i * L, i + 1, p_ + i * L);
    }
    solve(n, later ? ds : nullptr);
    of_pairs(n);
    for (int64_t i = 0; i < n; ++i) {
      const C *x = dx_ + i * values, *v = chunk_.v + i * values, *answered = chunk_.answered + i * values;
      dbeta_[i] += row_sum<C>(values, [&](int64_t e, auto) {
        const Lanes<C> y = Lanes<C>::load(v + e);
        return Lanes<C>::load(x + e) * (before ? y - Lanes<C>::load(answered + e) : y);
      });
      scale(chunk_.beta[i], values, x, g_first_);
      store_row(g_first_, chunk_.width, row_of<T>(d_.v, b, run.first + i, h));
    }
    if (later) {  // of Λ_last k uᵀ, which the state behind has
      transposed(ds, keys, values, state_t_);
      for (int64_t i = 0; i < n; ++i) scale(chunk_.to_last[i], values, chunk_.u + i * values, u_last_ + i * values);
      C last = before ? chunk_.from_first[n - 1] * dot(s_.state(), before, ds) : C(0);
      times_state(n, u_last_, keys_.k, dk_, [&](int64_t i, C z) { dsums_[i] -= z, last += z; });
      dsums_[n - 1] += last;
      scale(chunk_.from_first[n - 1], s_.state(), ds, ds);
    }
    if (before) {  // of what the state before answers
      transposed(before, keys, values, state_t_);
      for (int64_t i = 0; i < n; ++i) {
        scale(chunk_.from_first[i], values, g_ + i * values, g_first_ + i * values);
        scale(-chunk_.beta[i] * chunk_.from_first[i], values, dx_ + i * values, x_first_ + i * values);
      }
      times_state(n, g_first_, keys_.q, dq_, [&](int64_t i, C z) { dsums_[i] += z; });
      times_state(n, x_first_, keys_.k, dk_, [&](int64_t i, C z) { dsums_[i] += z; });
      tile_gemm<C>(width, values, n, keys_.q, 1, keys, g_first_, values, ds, values, later);
      tile_gemm<C>(width, values, n, keys_.k, 1, keys, x_first_, values, ds, values, true);
      if (!later) std::fill(ds + width * values, ds + s_.state(), C(0));
    }
    C sum = 0;
    for (int64_t i = n - 1; i >= 0; --i) {
      sum += dsums_[i];
      element<C>(d_.decay, b, run.first + i, h) = element<C>(x_.decay, b, run.first + i, h) > Chunk<T, C>::kCut ? sum : C(0);
      element<C>(d_.beta, b, run.first + i, h) = dbeta_[i];
    }
  }

  /// dx_ = X, of what the results and the state behind, of gradient `ds`, have of what is written.
  void solve(int64_t n, const C* ds) {
    const int64_t values = chunk_.columns;
    if (ds) {
      tile_gemm<C>(n, values, keys_.width, keys_.k, keys_.columns, 1, ds, values, dx_, values, false);
      for (int64_t i = 0; i < n; ++i) scale(chunk_.to_last[i], values, dx_ + i * values, dx_ + i * values);
    }
    for (int64_t j = (n - 1) / kBlock * kBlock; j >= 0; j -= kBlock) {
      const int64_t rows = std::min(kBlock, n - j), below = j + kBlock;
      tile_gemm<C>(rows, values, n - j, p_ + j * L + j, 1, L, g_ + j * values, values, dx_ + j * values, values, ds != nullptr);
      if (below < n)
        tile_gemm<C>(rows, values, n - below, chunk_.a + below * L + j, 1, L, dx_ + below * values, values, dx_ + j * values, values, true);
      for (int64_t r = j + rows - 1; r >= j; --r)
        for (int64_t i = r + 1; i < j + rows; ++i) add_scaled(chunk_.a[i * L + r], values, dx_ + i * values, dx_ + r * values);
    }
  }

  /// What pairs of tokens have: of the products of queries and keys, of the sums of decays, of beta.
  void of_pairs(int64_t n) {
    const int64_t values = chunk_.columns;
    std::fill_n(columns_, L, C(0));
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t rows = std::min(kBlock, n - i), seen = i + kBlock;
      tile_gemm<C>(rows, seen, chunk_.width, dx_ + i * values, values, 1, u_t_, L, da_ + i * L, L, false);
      tile_gemm<C>(rows, seen, chunk_.width, g_ + i * values, values, 1, u_t_, L, dp_ + i * L, L, false);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t padded = lane_padded(i + 1);
      const C *decay = chunk_.decays + i * L, *kk = keys_.kk + i * L, *p = p_ + i * L, *dp = dp_ + i * L;
      C *da = da_ + i * L, *dkk = dkk_ + i * L, *dqk = dqk_ + i * L;
      std::fill(da + i, da + padded, C(0));
      const Lanes<C> minus_beta(-chunk_.beta[i]), minus_one(C(-1));
      Lanes<C> of_row(C(0)), of_beta(C(0));
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Lanes<C> e = Lanes<C>::load(decay + j), a = Lanes<C>::load(da + j) * e, dpe = Lanes<C>::load(dp + j);
        const Lanes<C> akk = a * Lanes<C>::load(kk + j);
        fma(a, minus_beta, Lanes<C>::load(dkk + j)).store(dkk + j);
        fma(dpe, e, Lanes<C>::load(dqk + j)).store(dqk + j);
        const Lanes<C> pair = fma(akk, minus_beta, dpe * Lanes<C>::load(p + j));
        of_row = of_row + pair, of_beta = fma(akk, minus_one, of_beta);
        (Lanes<C>::load(columns_ + j) + pair).store(columns_ + j);
      }
      dsums_[i] = sum(of_row), dbeta_[i] = sum(of_beta);
    }
    for (int64_t i = 0; i < n; ++i) dsums_[i] -= columns_[i];
  }

  /// Adds rows[n, E] times the transposed state to `to`[n, D]; f(i, what row i of `with` makes of it).
  template <class F>
  void times_state(int64_t n, const C* rows, const C* with, C* to, F&& f) {
    const int64_t keys = keys_.columns;
    tile_gemm<C>(n, keys, chunk_.width, rows, chunk_.columns, 1, state_t_, keys, by_state_, keys, false);
    for (int64_t i = 0; i < n; ++i) {
      add_scaled(C(1), keys, by_state_ + i * keys, to + i * keys);
      f(i, dot(keys, with + i * keys, by_state_ + i * keys));
    }
  }

  /// What products of queries and keys with keys have, of all heads together.
  void of_keys(int64_t b, int64_t g, const Run& run) {
    const int64_t n = run.count, keys = keys_.columns;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t rows = std::min(kBlock, n - i), seen = std::min(i + kBlock, n), below = i * L + i;
      const auto add = [&](const C* pairs, int64_t row, int64_t column, int64_t depth, const C* with, C* to) {
        tile_gemm<C>(rows, keys, depth, pairs, row, column, with, keys, to + i * keys, keys, true);
      };
      add(dqk_ + i * L, L, 1, seen, keys_.k, dq_);
      add(dkk_ + i * L, L, 1, seen, keys_.k, dk_);
      add(dkk_ + below, 1, L, n - i, keys_.k + i * keys, dk_);
      add(dqk_ + below, 1, L, n - i, keys_.q + i * keys, dk_);
    }
    keys_.store_gradient(keys_.q, dq_, keys_.q_norm, keys_.factor(), b, run.first, n, g, d_.q, by_state_);
    keys_.store_gradient(keys_.k, dk_, keys_.k_norm, C(1), b, run.first, n, g, d_.k, by_state_);
  }

  const DeltaRuleOperands& x_;
  const View &dout_, &dstate_;
  const DeltaRuleGradients& d_;
  const DeltaRuleSizes s_;
  Scratch<C> scratch_;
  Keys<T, C> keys_;
  Chunk<T, C> chunk_;
  std::vector<Run> runs_;
  C *states_, *g_, *g_first_, *x_first_, *u_last_, *dx_, *dq_, *dk_, *by_state_, *p_, *da_, *dp_, *dqk_, *dkk_, *u_t_, *state_t_, *dsums_,
      *columns_, *dbeta_;
};

}  // namespace

void delta_rule_backward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout, const View& dstate,
                         const DeltaRuleGradients& d, Workspace workspace) {
  visit_floating("delta_rule_backward", x.q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const DeltaRuleSizes s(x);
    const int64_t cells = DeltaRuleSizes::aligned<C>(s.backward_cells());
    parallel_slots(s.items(), s.slots(), [&](int64_t slot, int64_t begin, int64_t end) {
      Backward<T> head(x, options, dout, dstate, d, static_cast<C*>(workspace.data) + slot * cells);
      for (int64_t item = begin; item < end; ++item) head.run(item / s.key_heads, item % s.key_heads);
    });
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
