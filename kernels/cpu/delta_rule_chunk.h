// The part of both delta-rule passes that is computed per chunk of a key head; its formulas and letters are delta_rule.h's. Included by
// kernels.
#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "sheaf/kernels/cpu/delta_rule_chunks.h"
#include "sheaf/kernels/cpu/lower_products.h"
#include "sheaf/kernels/cpu/row_math.h"

namespace sheaf::kernels::cpu {

/// to = factor from, of n values, a multiple of kLanes; both may be the same memory.
template <class C>
void scale_row(C factor, const C* from, int64_t n, C* to) {
  const Lanes<C> f(factor);
  for (int64_t i = 0; i < n; i += kLanes) (f * Lanes<C>::load(from + i)).store(to + i);
}

template <class C>
C dot(const C* a, const C* b, int64_t n) {
  return row_sum<C>(n, [&](int64_t i, auto) { return Lanes<C>::load(a + i) * Lanes<C>::load(b + i); });
}

/// A state view [B, H, D, E] as rows: [B, D, H, E].
inline View rows_of(View state) {
  std::swap(state.shape[1], state.shape[2]), std::swap(state.strides[1], state.strides[2]);
  return state;
}

/// T: storage type, C: compute type.
template <class T, class C>
class DeltaRuleChunk {
 public:
  /// Cuts chunk_cells() off `scratch`.
  DeltaRuleChunk(const DeltaRuleOperands& x, const DeltaRuleOptions& options, C*& scratch)
      : s_(x), x_(x), scale_(static_cast<C>(options.scale)), eps_(static_cast<C>(options.norm_eps)) {
    const auto take = [&](int64_t cells) { return std::exchange(scratch, scratch + cells); };
    const int64_t of_keys = kDeltaChunk * s_.columns(), of_values = kDeltaChunk * s_.value_columns(), square = s_.kSquare;
    keys_ = take(of_keys), keys_t_ = take(of_keys), queries_ = take(of_keys);
    differences_ = take(of_values), written_ = take(of_values), result_ = take(of_values);
    kk_ = take(square), qk_ = take(square), ratios_ = take(square), lower_ = take(square), scores_ = take(square);
    beta_ = take(kDeltaChunk), gamma_ = take(kDeltaChunk), key_factors_ = take(kDeltaChunk), query_factors_ = take(kDeltaChunk);
  }

 protected:
  /// Rows of head h of a [B, T, H, ..] view, from the chunk's first on.
  HeadRows<const T> rows(const View& v, int64_t h) const { return {v, b_, chunk_.first, h}; }
  C& gate(const View& v, int64_t i, int64_t h) const {
    return v.as<C>()[b_ * v.strides[0] + (chunk_.first + i) * v.strides[1] + h * v.strides[2]];
  }

  /// Loads keys of the chunk and computes their products. The functions below refer to this chunk, too.
  void load_keys(int64_t b, int64_t g, const Chunk& chunk) {
    b_ = b, chunk_ = chunk, n_ = chunk.count;
    load_normalised(x_.k, g, keys_, key_factors_);
    transpose(keys_, kDeltaChunk, s_.columns(), keys_t_);
    product_to_lower(n_, s_.width, keys_, s_.columns(), keys_t_, kk_);
  }
  void load_queries(int64_t g) {
    load_normalised(x_.q, g, queries_, query_factors_);
    product_to_lower(n_, s_.width, queries_, s_.columns(), keys_t_, qk_);
  }

  /// beta, γ, Λ of head h, and N, which is -A / beta below the diagonal. The diagonal is never read.
  void load_gates(int64_t h) {
    C sums[kDeltaChunk] = {}, sum = 0, since[kDeltaChunk];  // since[j]: the sum after token j, up to the current one
    std::fill_n(since, kDeltaChunk, -std::numeric_limits<C>::infinity());
    for (int64_t i = 0; i < n_; ++i) {
      const C decay = gate(x_.decay, i, h);
      beta_[i] = gate(x_.beta, i, h);
      sums[i] = sum += decay;
      const int64_t columns = padded(i + 1);
      for (int64_t j = 0; j < columns; j += kLanes) (Lanes<C>::load(since + j) + Lanes<C>(decay)).store(since + j);
      since[i] = 0;
      C *ratios = ratios_ + i * kDeltaChunk, *lower = lower_ + i * kDeltaChunk;
      const C* kk = kk_ + i * kDeltaChunk;
      for (int64_t j = 0; j < columns; j += kLanes) {
        const Lanes<C> ratio = exp(Lanes<C>::load(since + j));
        ratio.store(ratios + j);
        (Lanes<C>(C(0)) - ratio * Lanes<C>::load(kk + j)).store(lower + j);
      }
    }
    for (int64_t i = 0; i < kDeltaChunk; i += kLanes) exp(Lanes<C>::load(sums + i)).store(gamma_ + i);
  }
  /// P.
  void make_scores() {
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = i * kDeltaChunk; j < i * kDeltaChunk + padded(i + 1); j += kLanes)
        (Lanes<C>(scale_) * Lanes<C>::load(ratios_ + j) * Lanes<C>::load(qk_ + j)).store(scores_ + j);
  }
  const C* last_ratios() const { return ratios_ + (n_ - 1) * kDeltaChunk; }
  C last_gamma() const { return gamma_[n_ - 1]; }

  /// Computes u, what each token writes, and u / beta, the difference between its value and the state's answer. A null state is zero.
  void write(int64_t h, const C* state) {
    const int64_t columns = s_.value_columns();
    pack<T, C>(rows(x_.v, h), 0, n_, n_, C(1), differences_);
    if (state) {
      tile_gemm<C>(n_, columns, s_.width, keys_, s_.columns(), 1, state, columns, result_, columns, false);
      for (int64_t i = 0; i < n_; ++i) {
        const Lanes<C> factor(-gamma_[i]);
        for (int64_t e = i * columns; e < (i + 1) * columns; e += kLanes)
          fma(factor, Lanes<C>::load(result_ + e), Lanes<C>::load(differences_ + e)).store(differences_ + e);
      }
    }
    solve_lower(n_, columns, lower_, beta_, differences_, written_);
  }

  /// The state after the chunk, from the one before it. Scales u in place.
  void advance(const C* from, C* to) {
    const int64_t columns = s_.value_columns();
    for (int64_t i = 0; i < n_; ++i) scale_row(last_ratios()[i], written_ + i * columns, columns, written_ + i * columns);
    decay_state(from, to);
    tile_gemm<C>(s_.width, columns, n_, keys_, 1, s_.columns(), written_, columns, to, columns, true);
  }
  /// to = γ_last from, zero if there is none.
  void decay_state(const C* from, C* to) const {
    if (from)
      scale_row(last_gamma(), from, s_.state_cells(), to);
    else
      std::fill_n(to, s_.state_cells(), C(0));
  }

  DeltaRuleShape s_;
  const DeltaRuleOperands& x_;
  C scale_, eps_;
  int64_t b_ = 0, n_ = 0;
  Chunk chunk_{};
  C *keys_, *keys_t_, *queries_, *key_factors_, *query_factors_;
  C *differences_, *written_, *result_;
  C *kk_, *qk_, *ratios_, *lower_, *scores_, *beta_, *gamma_;

 private:
  void load_normalised(const View& from, int64_t g, C* to, C* factors) const {
    pack<T, C>(rows(from, g), 0, n_, kDeltaChunk, C(1), to);
    if (eps_ == 0) return;
    const int64_t columns = s_.columns();
    for (int64_t i = 0; i < n_; ++i, to += columns) {
      factors[i] = C(1) / std::sqrt(dot(to, to, columns) + eps_);
      scale_row(factors[i], to, columns, to);
    }
  }
};

/// Calls pass(scratch).run(b, g) for all items, with separate scratch memory per slot.
template <class C, class Pass>
void run_items(const DeltaRuleShape& s, int64_t cells, Workspace workspace, Pass pass) {
  const auto slot_cells = static_cast<int64_t>(line_align(static_cast<size_t>(cells) * sizeof(C)) / sizeof(C));
  parallel_slots(s.items(), s.slots(), [&](int64_t slot, int64_t begin, int64_t end) {
    if (begin == end) return;
    auto head = pass(static_cast<C*>(workspace.data) + slot * slot_cells);
    for (int64_t item = begin; item < end; ++item) head.run(item / s.key_heads, item % s.key_heads);
  });
}

}  // namespace sheaf::kernels::cpu
