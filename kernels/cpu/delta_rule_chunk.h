// A chunk of the gated delta rule, for kernels that are compiled twice ([Note: two builds of one kernel] in simd.h). Sizes and formulas
// are named in delta_rule.h. Scratch rows are padded to whole lanes, with zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "sheaf/kernels/cpu/delta_rule_sizes.h"
#include "sheaf/kernels/cpu/documents.h"
#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/tile_gemm.h"
#include "sheaf/kernels/cpu/transpose.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

constexpr int64_t L = kDeltaChunk;
constexpr int64_t kBlock = 16;  // rows of a triangle that are multiplied together

/// Parts of a slot's scratch memory, one behind another.
template <class C>
struct Scratch {
  C* next;
  C* take(int64_t cells) { return std::exchange(next, next + cells); }
};

/// Row t of head h of x[B, T, heads, width].
template <class T>
T* row_of(const View& x, int64_t b, int64_t t, int64_t h) {
  return x.as<T>() + b * x.strides[0] + t * x.strides[1] + h * x.strides[2];
}
/// An element of x[B, T, heads].
template <class C>
C& element(const View& x, int64_t b, int64_t t, int64_t h) {
  return x.as<C>()[b * x.strides[0] + t * x.strides[1] + h * x.strides[2]];
}

template <class T, class C>
void load_row(const T* from, int64_t width, C* to) {
  for_lanes(width, [&](int64_t i, auto n) { load_lanes(from + i, n).store(to + i); });
}
template <class T, class C>
void store_row(const C* from, int64_t width, T* to) {
  for_lanes(width, [&](int64_t i, auto n) { store_lanes(to + i, Lanes<C>::load(from + i), n); });
}
/// y = a x, y = y + a x over `columns`, which are whole lanes.
template <class C>
SHEAF_INLINE void scale(C a, int64_t columns, const C* x, C* y) {
  const Lanes<C> factor(a);
  for (int64_t i = 0; i < columns; i += kLanes) (Lanes<C>::load(x + i) * factor).store(y + i);
}
template <class C>
SHEAF_INLINE void add_scaled(C a, int64_t columns, const C* x, C* y) {
  const Lanes<C> factor(a);
  for (int64_t i = 0; i < columns; i += kLanes) fma(factor, Lanes<C>::load(x + i), Lanes<C>::load(y + i)).store(y + i);
}
template <class C>
SHEAF_INLINE C dot(int64_t columns, const C* x, const C* y) {
  return row_sum<C>(columns, [&](int64_t i, auto) { return Lanes<C>::load(x + i) * Lanes<C>::load(y + i); });
}
template <class C>
void transposed(const C* from, int64_t rows, int64_t columns, C* to) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) transpose_16x16(from + r * columns + c, columns, to + c * rows + r, rows);
}

/// Queries (times scale) and keys of a chunk of one key head, and their products with keys. Rows behind the last are zeros.
template <class T, class C>
class Keys {
 public:
  Keys(const DeltaRuleOperands& x, const DeltaRuleOptions& o, Scratch<C>& scratch)
      : q_(x.q), k_(x.k), scale_(static_cast<C>(o.scale)), eps_(static_cast<C>(o.norm_eps)), width(x.q.shape[3]), columns(lane_padded(width)) {
    q = scratch.take(L * columns), k = scratch.take(L * columns), k_t = scratch.take(columns * L);
    q_norm = scratch.take(L), k_norm = scratch.take(L), qk = scratch.take(L * L), kk = scratch.take(L * L);
  }

  void load(int64_t b, int64_t first, int64_t count, int64_t g) {
    load(q_, b, first, count, g, scale_, q, q_norm);
    load(k_, b, first, count, g, C(1), k, k_norm);
    transposed(k, L, columns, k_t);
    for (int64_t i = 0; i < count; i += kBlock) {  // a key meets those before it
      const int64_t rows = std::min(kBlock, count - i), seen = i + kBlock;
      tile_gemm<C>(rows, seen, width, q + i * columns, columns, 1, k_t, L, qk + i * L, L, false);
      tile_gemm<C>(rows, seen, width, k + i * columns, columns, 1, k_t, L, kk + i * L, L, false);
    }
  }

  /// The gradient of what is read, of x / norm times `factor`: of x with y = x * norm * factor and dy.
  void store_gradient(const C* y, const C* dy, const C* norm, C factor, int64_t b, int64_t first, int64_t count, int64_t g, const View& to,
                      C* row) const {
    for (int64_t r = 0; r < count; ++r) {
      scale(norm[r] * factor, columns, dy + r * columns, row);
      if (eps_ > C(0)) add_scaled(-norm[r] * dot(columns, y + r * columns, dy + r * columns) / factor, columns, y + r * columns, row);
      store_row(row, width, row_of<T>(to, b, first + r, g));
    }
  }
  C factor() const { return scale_; }

 private:
  void load(const View& x, int64_t b, int64_t first, int64_t count, int64_t g, C factor, C* to, C* norm) const {
    for (int64_t r = 0; r < count; ++r, to += columns) {
      load_row(row_of<const T>(x, b, first + r, g), width, to);
      norm[r] = eps_ > C(0) ? C(1) / std::sqrt(dot(columns, to, to) + eps_) : C(1);
      scale(norm[r] * factor, columns, to, to);
    }
    std::fill_n(to, (L - count) * columns, C(0));
  }

  const View &q_, &k_;
  const C scale_, eps_;

 public:
  const int64_t width, columns;
  C *q, *k, *k_t, *q_norm, *k_norm, *qk, *kk;
};

/// Of one value head, what the tokens of a chunk write into its state.
template <class T, class C>
class Chunk {
 public:
  /// Decays as low, whose exponential is 0, are taken for it: sums are numbers then, as -inf's are not.
  static constexpr C kCut = sizeof(C) == 8 ? C(-800) : C(-120);

  Chunk(const DeltaRuleOperands& x, Scratch<C>& scratch) : x_(x), width(x.v.shape[3]), columns(lane_padded(width)) {
    v = scratch.take(L * columns), answered = scratch.take(L * columns), u = scratch.take(L * columns);
    decays = scratch.take(L * L), a = scratch.take(L * L);
    from_first = scratch.take(L), to_last = scratch.take(L), beta = scratch.take(L);
  }

  /// From `state`, that before the chunk; null: zero.
  void write(const Keys<T, C>& keys, const C* state, int64_t b, int64_t first, int64_t count, int64_t h) {
    load_rates(b, first, count, h);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t seen = i + 1, padded = lane_padded(seen);
      const Lanes<C> share(-beta[i]);
      C *decay = decays + i * L, *row = a + i * L;
      for (int64_t j = 0; j < padded; ++j) decay[j] = static_cast<C>(sums_[i] - sums_[j]);
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Lanes<C> e = exp(Lanes<C>::load(decay + j));
        e.store(decay + j);
        (e * share * Lanes<C>::load(keys.kk + i * L + j)).store(row + j);
      }
      std::fill(decay + seen, decay + padded, C(0));
    }
    for (int64_t i = 0; i < count; ++i) load_row(row_of<const T>(x_.v, b, first + i, h), width, v + i * columns);
    if (state) tile_gemm<C>(count, columns, keys.width, keys.k, keys.columns, 1, state, columns, answered, columns, false);
    for (int64_t i = 0; i < count; ++i) {
      C* row = u + i * columns;
      scale(beta[i], columns, v + i * columns, row);
      if (!state) continue;
      scale(from_first[i], columns, answered + i * columns, answered + i * columns);
      add_scaled(-beta[i], columns, answered + i * columns, row);
    }
    // (1 + A) u = beta (v - what the state answers), A = -a, block by block.
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t rows = std::min(kBlock, count - i);
      if (i > 0) tile_gemm<C>(rows, columns, i, a + i * L, L, 1, u, columns, u + i * columns, columns, true);
      for (int64_t r = i + 1; r < i + rows; ++r)
        for (int64_t j = i; j < r; ++j) add_scaled(a[r * L + j], columns, u + j * columns, u + r * columns);
    }
  }

  /// The state behind the chunk, from that before it.
  void advance(const Keys<T, C>& keys, bool fresh, int64_t count, C* state, C* scaled) const {
    for (int64_t i = 0; i < count; ++i) scale(to_last[i], columns, u + i * columns, scaled + i * columns);
    if (!fresh) scale(from_first[count - 1], keys.width * columns, state, state);
    tile_gemm<C>(keys.width, columns, count, keys.k, 1, keys.columns, scaled, columns, state, columns, !fresh);
  }

  /// What queries get, into `out`[count, columns].
  void answer(const Keys<T, C>& keys, const C* state, int64_t count, C* out) {
    if (state) {
      tile_gemm<C>(count, columns, keys.width, keys.q, keys.columns, 1, state, columns, out, columns, false);
      for (int64_t i = 0; i < count; ++i) scale(from_first[i], columns, out + i * columns, out + i * columns);
    }
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t rows = std::min(kBlock, count - i), seen = std::min(i + kBlock, count);
      for (int64_t r = i; r < i + rows; ++r) multiply(decays + r * L, keys.qk + r * L, seen, a + r * L);  // P in A's place, which is done
      tile_gemm<C>(rows, columns, seen, a + i * L, L, 1, u, columns, out + i * columns, columns, state != nullptr);
    }
  }

  static void multiply(const C* x, const C* y, int64_t n, C* to) {
    for (int64_t j = 0; j < lane_padded(n); j += kLanes) (Lanes<C>::load(x + j) * Lanes<C>::load(y + j)).store(to + j);
  }

 private:
  void load_rates(int64_t b, int64_t first, int64_t count, int64_t h) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      sums_[i] = sum += static_cast<double>(std::max(element<C>(x_.decay, b, first + i, h), kCut));
      from_first[i] = static_cast<C>(sum), beta[i] = element<C>(x_.beta, b, first + i, h);
    }
    std::fill(sums_ + count, sums_ + L, sum);
    std::fill(from_first + count, from_first + lane_padded(count), C(0));
    for (int64_t i = 0; i < lane_padded(count); ++i) to_last[i] = static_cast<C>(sum - sums_[i]);
    for (int64_t i = 0; i < count; i += kLanes) {
      exp(Lanes<C>::load(from_first + i)).store(from_first + i);
      exp(Lanes<C>::load(to_last + i)).store(to_last + i);
    }
  }

  const DeltaRuleOperands& x_;

 public:
  const int64_t width, columns;
  C *v, *answered, *u, *decays, *a, *from_first, *to_last, *beta;

 private:
  double sums_[L];  // of decays, of whose differences f32 would leave few digits
};


template <class C>
void load_state(const DeltaRuleSizes& s, const View& from, int64_t b, int64_t h, C* to) {
  const C* rows = from.as<C>() + b * from.strides[0] + h * from.strides[1];
  for (int64_t d = 0; d < s.width; ++d) load_row(rows + d * s.value_width, s.value_width, to + d * s.values());
}
template <class C>
void store_state(const DeltaRuleSizes& s, const C* from, int64_t b, int64_t h, const View& to) {
  C* rows = to.as<C>() + b * to.strides[0] + h * to.strides[1];
  for (int64_t d = 0; d < s.width; ++d) store_row(from + d * s.values(), s.value_width, rows + d * s.value_width);
}

}  // namespace
}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
