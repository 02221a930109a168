// Gradients of the gated delta rule, compiled twice. With G the gradient of a chunk's results, dS that of the state after it, X that of
// beta (v - γ Sᵀ k), the right-hand side from which u is solved, and Y = beta X:
//
//   dU = Pᵀ G + Λ_last K dS      (1 + A)ᵀ X = dU      dP = G Uᵀ (j <= i)      dN = Y Uᵀ (j < i), N = -A / beta
//   dv = Y      dbeta_i = X_i·u_i / beta_i      dS before = γ_last dS + scale Qᵀ γ G - Kᵀ γ Y
//
// and the rest by products. There is no division by beta: u / beta is kept from the first pass, which computes the states.
#include "sheaf/kernels/cpu/delta_rule_chunk.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

template <class T, class C = ComputeType<T>>
class Backward : DeltaRuleChunk<T, C> {
 public:
  Backward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout, const View& dstate, const DeltaRuleGradients& d,
           C* scratch)
      : DeltaRuleChunk<T, C>(x, options, scratch), dout_(dout), dstate_(dstate), d_(d) {
    const auto take = [&](int64_t cells) { return std::exchange(scratch, scratch + cells); };
    const int64_t of_keys = kDeltaChunk * s_.columns(), of_values = kDeltaChunk * s_.value_columns(), square = s_.kSquare,
                  chunks = (s_.tokens + kDeltaChunk - 1) / kDeltaChunk;
    initial_ = take(s_.group() * s_.state_cells()), dstates_ = take(s_.group() * s_.state_cells());
    states_ = take(chunks * s_.group() * s_.state_cells());
    all_differences_ = take(s_.group() * s_.tokens * s_.value_columns());
    dscores_ = take(square), dlower_ = take(square), dqk_ = take(square), dkk_ = take(square);
    dresult_ = take(of_values), dwritten_ = take(of_values), shared_ = take(of_values), written_t_ = take(of_values);
    dqueries_ = take(of_keys), dkeys_ = take(of_keys), answers_ = take(of_keys);
    dgamma_ = take(kDeltaChunk);
    state_t_ = take(s_.state_cells());
  }

  void run(int64_t b, int64_t g) {
    const Chunks chunks(x_.begins, b, s_.tokens);
    const int64_t first_head = g * s_.group();
    if (given(x_.initial))
      for (int64_t j = 0; j < s_.group(); ++j)
        pack<C, C>({rows_of(x_.initial), b, 0, first_head + j}, 0, s_.width, s_.columns(), C(1), initial_ + j * s_.state_cells());
    for (int64_t t = 0; t < s_.tokens; t += n_) {
      load_keys(b, g, chunks.from(t));
      for (int64_t j = 0; j < s_.group(); ++j) keep(first_head + j, j);
    }
    if (given(dstate_))
      for (int64_t j = 0; j < s_.group(); ++j)
        pack<C, C>({rows_of(dstate_), b, 0, first_head + j}, 0, s_.width, s_.columns(), C(1), dstates_ + j * s_.state_cells());
    for (int64_t end = s_.tokens; end > 0; end -= n_) {
      load_keys(b, g, chunks.before(end));
      load_queries(g);
      for (C* sums : {dqk_, dkk_}) std::fill_n(sums, s_.kSquare, C(0));
      for (C* sums : {dqueries_, dkeys_}) std::fill_n(sums, kDeltaChunk * s_.columns(), C(0));
      for (int64_t j = 0; j < s_.group(); ++j) head(first_head + j, j);
      store_keys(g);
    }
    if (!given(d_.initial)) return;
    for (int64_t j = 0; j < s_.group(); ++j) {
      C* dstate = dstates_ + j * s_.state_cells();
      if (s_.tokens == 0 && !given(dstate_)) std::fill_n(dstate, s_.state_cells(), C(0));
      unpack(dstate, C(1), HeadRows<C>(rows_of(d_.initial), b, 0, first_head + j), 0, s_.width);
    }
  }

 private:
  using Base = DeltaRuleChunk<T, C>;
  using Base::s_, Base::x_, Base::n_, Base::chunk_, Base::b_, Base::load_keys, Base::load_queries, Base::keys_, Base::queries_,
      Base::ratios_, Base::lower_, Base::gamma_, Base::beta_, Base::scale_, Base::scores_, Base::written_, Base::gate, Base::differences_,
      Base::last_gamma, Base::last_ratios, Base::key_factors_, Base::query_factors_, Base::eps_;

  /// The state before the chunk, nullptr if it is zero. Every chunk but its document's first has its own slot: no other such chunk
  /// begins among the same kDeltaChunk tokens.
  C* state_before(int64_t j) const {
    if (!chunk_.begins) return state_slot(chunk_.first, j);
    return chunk_.first == 0 && given(x_.initial) ? initial_ + j * s_.state_cells() : nullptr;
  }
  C* state_slot(int64_t t, int64_t j) const { return states_ + (t / kDeltaChunk * s_.group() + j) * s_.state_cells(); }
  C* differences_of(int64_t j) const { return all_differences_ + (j * s_.tokens + chunk_.first) * s_.value_columns(); }

  /// Saves what the gradients of head h, the j-th of its key head, need.
  void keep(int64_t h, int64_t j) {
    this->load_gates(h);
    this->write(h, state_before(j));
    std::copy_n(differences_, n_ * s_.value_columns(), differences_of(j));
    if (!chunk_.ends) this->advance(state_before(j), state_slot(chunk_.first + n_, j));
  }

  /// Stores the gradients of operands that only head h reads, and adds to those of keys, queries and their products.
  void head(int64_t h, int64_t j) {
    const C* state = state_before(j);
    C* const dstate = dstates_ + j * s_.state_cells();
    const bool is_last = chunk_.first + n_ == s_.tokens, has_dstate = !chunk_.ends || (is_last && given(dstate_));
    const int64_t columns = s_.value_columns();
    this->load_gates(h);
    this->make_scores();
    const C* differences = differences_of(j);
    for (int64_t i = 0; i < n_; ++i) scale_row(beta_[i], differences + i * columns, columns, written_ + i * columns);
    pack<T, C>(this->rows(dout_, h), 0, n_, n_, C(1), dresult_);

    // dU, X and the gradients that follow from rows of X.
    lower_transposed_product(n_, columns, scores_, dresult_, dwritten_, false);
    C last_dots[kDeltaChunk] = {};  // Λ_last,j ∂/∂Λ_last,j
    if (has_dstate) {
      tile_gemm<C>(n_, columns, s_.width, keys_, s_.columns(), 1, dstate, columns, shared_, columns, false);
      for (int64_t i = 0; i < n_; ++i) {
        C* row = shared_ + i * columns;
        scale_row(last_ratios()[i], row, columns, row);
        last_dots[i] = dot(row, written_ + i * columns, columns);
        for (int64_t e = 0; e < columns; e += kLanes)
          (Lanes<C>::load(dwritten_ + i * columns + e) + Lanes<C>::load(row + e)).store(dwritten_ + i * columns + e);
      }
    }
    C* const dvalues = shared_;
    solve_lower_transposed(n_, columns, lower_, beta_, dwritten_, dvalues);
    unpack(dvalues, C(1), HeadRows<T>(d_.v, b_, chunk_.first, h), 0, n_);
    for (int64_t i = 0; i < n_; ++i) gate(d_.beta, i, h) = dot(dwritten_ + i * columns, differences + i * columns, columns);

    // dP and dN. Their columns after the last token, which are undefined, are never read.
    transpose(written_, kDeltaChunk, columns, written_t_);
    product_to_lower(n_, s_.value_width, dresult_, columns, written_t_, dscores_);
    product_to_lower(n_, s_.value_width, dvalues, columns, written_t_, dlower_);
    for (int64_t i = 0; i < n_; ++i) {
      dlower_[i * kDeltaChunk + i] = 0;
      for (int64_t e = i * kDeltaChunk; e < i * kDeltaChunk + padded(i + 1); e += kLanes) {
        using L = Lanes<C>;
        const L dscores = L::load(dscores_ + e), dlower = L::load(dlower_ + e), ratios = L::load(ratios_ + e);
        fma(L(scale_) * ratios, dscores, L::load(dqk_ + e)).store(dqk_ + e);
        fma(L(C(-1)) * ratios, dlower, L::load(dkk_ + e)).store(dkk_ + e);
        // The gradient of Λ, times Λ.
        fma(dscores, L::load(scores_ + e), dlower * L::load(lower_ + e)).store(dscores_ + e);
      }
    }
    C* const dratios = dscores_;
    for (int64_t i = 0; i < n_; ++i) dratios[(n_ - 1) * kDeltaChunk + i] += last_dots[i];

    // Through the state before the chunk: rows of dresult_ and dvalues become gradients of Sᵀ q and Sᵀ k.
    for (int64_t i = 0; i < n_; ++i) {
      scale_row(scale_ * gamma_[i], dresult_ + i * columns, columns, dresult_ + i * columns);
      scale_row(-gamma_[i], dvalues + i * columns, columns, dvalues + i * columns);
    }
    std::fill_n(dgamma_, kDeltaChunk, C(0));
    if (state) {
      transpose(state, s_.columns(), columns, state_t_);
      answer(dresult_, queries_, dqueries_);
      answer(dvalues, keys_, dkeys_);
      if (has_dstate) dgamma_[n_ - 1] += last_gamma() * dot(state, dstate, s_.state_cells());
    }
    if (has_dstate) {
      transpose(dstate, s_.columns(), columns, state_t_);
      for (int64_t i = 0; i < n_; ++i) scale_row(last_ratios()[i], written_ + i * columns, columns, written_ + i * columns);
      tile_gemm<C>(n_, s_.columns(), s_.value_width, written_, columns, 1, state_t_, s_.columns(), dkeys_, s_.columns(), true);
    }
    if (!chunk_.begins || (chunk_.first == 0 && given(d_.initial))) {
      this->decay_state(has_dstate ? dstate : nullptr, dstate);
      tile_gemm<C>(s_.width, columns, n_, queries_, 1, s_.columns(), dresult_, columns, dstate, columns, true);
      tile_gemm<C>(s_.width, columns, n_, keys_, 1, s_.columns(), dvalues, columns, dstate, columns, true);
    }
    store_decays(h, dratios);
  }

  /// dx += dy Sᵀ, and the gradient of γ from it, times γ.
  void answer(const C* dy, const C* x, C* dx) {
    const int64_t columns = s_.columns();
    tile_gemm<C>(n_, columns, s_.value_width, dy, s_.value_columns(), 1, state_t_, columns, answers_, columns, false);
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t at = i * columns;
      dgamma_[i] += dot(x + at, answers_ + at, columns);
      for (int64_t d = at; d < at + columns; d += kLanes) (Lanes<C>::load(dx + d) + Lanes<C>::load(answers_ + d)).store(dx + d);
    }
  }

  /// A decay enters all Λ_ij with j before it and i not, and the γ_i with i not before it. Running sums from the last token
  /// backwards: no differences of sums, which would lose small values among large ones.
  void store_decays(int64_t h, const C* dratios) {
    C since[kDeltaChunk] = {}, sum = 0;
    for (int64_t i = n_; i-- > 0;) {
      const C* row = dratios + i * kDeltaChunk;
      for (int64_t j = 0; j < padded(i + 1); j += kLanes) (Lanes<C>::load(since + j) + Lanes<C>::load(row + j)).store(since + j);
      sum += dgamma_[i];
      gate(d_.decay, i, h) = sum + row_sum<C>(i, [&](int64_t j, auto n) { return load_lanes(since + j, n); });
    }
  }

  void store_keys(int64_t g) {
    const int64_t columns = s_.columns();
    lower_product(n_, columns, dqk_, keys_, dqueries_, true);
    lower_transposed_product(n_, columns, dqk_, queries_, dkeys_, true);
    lower_product(n_, columns, dkk_, keys_, dkeys_, true);
    lower_transposed_product(n_, columns, dkk_, keys_, dkeys_, true);
    store_normalised(dqueries_, queries_, query_factors_, d_.q, g);
    store_normalised(dkeys_, keys_, key_factors_, d_.k, g);
  }
  /// The gradient of y = factor x, factor = 1 / |x|: dx = factor (dy - y (y·dy)).
  void store_normalised(C* dy, const C* y, const C* factors, const View& to, int64_t g) {
    const int64_t columns = s_.columns();
    for (int64_t i = 0; i < n_ && eps_ != 0; ++i) {
      const int64_t at = i * columns;
      const Lanes<C> share(-dot(y + at, dy + at, columns)), factor(factors[i]);
      for (int64_t d = at; d < at + columns; d += kLanes)
        (factor * fma(share, Lanes<C>::load(y + d), Lanes<C>::load(dy + d))).store(dy + d);
    }
    unpack(dy, C(1), HeadRows<T>(to, b_, chunk_.first, g), 0, n_);
  }

  const View &dout_, &dstate_;
  const DeltaRuleGradients& d_;
  C *initial_, *dstates_, *states_, *all_differences_;
  C *dscores_, *dlower_, *dqk_, *dkk_, *dresult_, *dwritten_, *shared_, *written_t_, *dqueries_, *dkeys_, *answers_, *dgamma_, *state_t_;
};

}  // namespace

void delta_rule_backward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout, const View& dstate,
                         const DeltaRuleGradients& d, Workspace workspace) {
  visit_floating("delta_rule_backward", x.q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const DeltaRuleShape s(x);
    run_items<C>(s, s.backward_cells(), workspace, [&](C* scratch) { return Backward<T>(x, options, dout, dstate, d, scratch); });
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
