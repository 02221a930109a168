// Products of attention on tensor cores, in bf16 and f16, sums in f32: a warp computes them for 16 rows, whose elements are
// distributed over its lanes as in tensor_cores.h. Four neighbouring lanes share a row, and a lane has parts of two rows, `row` and
// `row` + 8.
//
// The result of one product is an operand of the next without any data movement: probabilities stay in registers between the scores
// and the product with values (FlashAttention-2: Dao, https://arxiv.org/abs/2307.08691), and are rounded to T.
#pragma once

#include <cmath>

#include "sheaf/kernels/cuda/attention_rows.h"
#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/tensor_cores.h"

namespace sheaf::kernels::cuda::attention_tiles::fragments {

inline constexpr int kWarps = 4, kThreads = kWarps * kWarp;
inline constexpr int kRows = 16 * kWarps;  ///< of a block's tile
inline constexpr int kKeys = 64;           ///< of a tile
inline constexpr int kSharers = 4;         ///< lanes that share a row
inline constexpr int kPadding = 64;        ///< columns are multiplied in groups of this many

inline constexpr float kLog2E = 1.44269504f;

/// 2^x as accurate as 16 bits need; 0 if that is less than 2^-126.
__device__ inline float power_of_2(float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  const float out = std::exp2(x);
  return out < 0x1p-126f ? 0.0f : out;
#endif
}

/// tanh to about 1e-7, as accurate as capped scores need.
__device__ inline float tangent(float x) {
  const float below = power_of_2(x * (2 * kLog2E)) + 1.0f;  // (1 - 2 / below)
#ifdef __CUDA_ARCH__
  return 1.0f - __fdividef(2.0f, below);
#else
  return 1.0f - 2.0f / below;
#endif
}

/// The scale factors of scores, which are products of queries and keys.
template <Hides kHides>
struct Scale {
  float natural, binary;  ///< > 0; binary: for exponents of 2
  float before;           ///< 1, or the whole scale if that is not positive: then the largest product would not be the largest score
  float cap;              ///< 0, or the softcap of scores; the whole scale is then in the argument of tanh

  __device__ explicit Scale(const Problem& p) : cap(kHides == Hides::nothing ? 0.0f : static_cast<float>(p.softcap)) {
    const auto scale = static_cast<float>(p.scale);
    const bool behind = scale > 0 && cap == 0;
    natural = behind ? scale : 1.0f, binary = natural * kLog2E;
    before = behind ? 1.0f : cap != 0 ? scale / cap : scale;
  }
  template <int kColumns>
  __device__ void prepare(float (&scores)[kColumns][4]) const {
    if (before == 1.0f && (kHides == Hides::nothing || cap == 0)) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] *= before;
        if (kHides != Hides::nothing && cap != 0) scores[n][i] = cap * tangent(scores[n][i]);
      }
  }
};

/// An operand, and whether its rows consist of whole packs of 16 bytes at multiples of 16.
struct Operand : Heads {
  bool packed;
  explicit Operand(const View& v) : Heads(v), packed(in_whole_packs(v)) {
    if (v.shape[1] <= 1) time = 0;  // any stride is accepted then, but a copy needs an aligned address, even for a row that is not there
  }
};

/// Rows of a head in shared memory, with 16 bytes of padding, so that eight rows cover all banks.
template <class T, int kWidth>
struct Tile {
  static constexpr int kPitch = kWidth + 8;
  static constexpr size_t bytes(int rows) { return size_t(rows) * kPitch * sizeof(T); }
  T* data;

  __device__ SharedMatrix<T> matrix() const { return {data, kPitch}; }

  /// Starts to copy kCount rows of `width` elements, without ending a round: row r from at(r), zeros if that is nullptr, and past the
  /// width up to the next multiple of kPadding.
  template <int kCount, class At>
  __device__ void load_rows(int width, bool packed, At at) const {
    constexpr int kPacks = kWidth / 8;
#pragma unroll 1
    for (int n = threadIdx.x; n < kCount * kPacks; n += kThreads) {
      const int row = n / kPacks, column = n % kPacks * 8;
      if (column >= padded(width)) continue;
      const T* from = at(row);
      const bool there = from != nullptr && column < width;
      T* to = data + row * kPitch + column;
      if (packed) copy_beside(to, from + column, there);
      else store_pack(to, there ? load_chunk(from, column, width) : Pack<T>{});
    }
  }
  /// Rows [first, first + kCount) of a head's `count`. If rows consist of whole packs, a thread steps from row to row.
  template <int kCount>
  __device__ void load(const Operand& from, int64_t b, int64_t h, int64_t first, int64_t count) const {
    constexpr int kPacks = kPadding / 8, kStep = kThreads / kPacks;
    static_assert(kCount % kStep == 0);
    const T* rows = static_cast<const T*>(from.data) + from.offset(b, first, h);
    const int left = count - first < kCount ? static_cast<int>(count - first) : kCount;
    if (!from.packed) return load_rows<kCount>(from.width, false, [&](int row) { return row < left ? rows + row * from.time : nullptr; });
    const int row = static_cast<int>(threadIdx.x) / kPacks, column = static_cast<int>(threadIdx.x) % kPacks * 8;
    const T* at = rows + row * from.time + column;
    T* to = data + row * kPitch + column;
#pragma unroll
    for (int c = 0; c < kWidth; c += kPadding) {
      if (c >= from.width) break;
      const bool wide = c + column < from.width;
      const T* line = at + c;
#pragma unroll
      for (int n = 0; n < kCount / kStep; ++n, line += kStep * from.time)
        copy_beside(to + n * kStep * kPitch + c, line, wide && row + n * kStep < left);
    }
  }

 private:
  __device__ static int padded(int width) { return (width + kPadding - 1) / kPadding * kPadding; }
};

/// Sums of a warp: 16 rows of 8 kColumns columns.
template <int kColumns>
using Sums = float[kColumns][4];

/// The i-th of this thread's two rows of a block's tile, and the first of its two columns in the n-th eight.
__device__ inline int row_of(int i) { return warp_of_thread() * 16 + lane_of_thread() / 4 + i * 8; }
__device__ inline int column_of(int n, int e) { return n * 8 + lane_of_thread() % 4 * 2 + e; }

/// 16 rows of a matrix of `width` columns, an operand of many products: kept in registers if they fit.
template <class T, int kWidth, bool kKept>
class SixteenRows {
 public:
  __device__ SixteenRows(const SharedMatrix<T>& from, int row) : from_(from), row_(row) {}
  /// Call it after `from` has arrived.
  __device__ void read(int width) {
    if constexpr (kKept)
#pragma unroll
      for (int k = 0; k < kWidth; k += 16) {
        if (k % kPadding == 0 && k >= width) break;
        from_.template as_a<false>(kept_[k / 16], row_, k);
      }
  }
  __device__ void get(unsigned (&to)[4], int k) const {
    if constexpr (kKept)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = kept_[k / 16][i];
    else
      from_.template as_a<false>(to, row_, k);
  }

 private:
  SharedMatrix<T> from_;
  int row_;
  unsigned kept_[kKept ? kWidth / 16 : 1][4];
};

/// sums = rows of a times rows [first, first + 8 kColumns) of b, of `width` elements.
template <int kColumns, class T, int kWidth, bool kKept>
__device__ void multiply_rows(const SixteenRows<T, kWidth, kKept>& a, const SharedMatrix<T>& b, int first, int width,
                              Sums<kColumns>& sums) {
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0;
#pragma unroll
  for (int k = 0; k < kWidth; k += 16) {
    if (k % kPadding == 0 && k >= width) break;
    unsigned of_a[4];
    a.get(of_a, k);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      unsigned of_b[4];
      b.template as_b<false>(of_b, first + n * 8, k);
      multiply_add<T>(sums[n], of_a, of_b[0], of_b[1]);
      multiply_add<T>(sums[n + 1], of_a, of_b[2], of_b[3]);
    }
  }
}

/// sums += weights, as T, times columns [first, first + 8 kColumns), up to `width`, of a matrix's first 8 kInner rows.
template <class T, int kInner, int kColumns>
__device__ void accumulate(const Sums<kInner>& weights, const SharedMatrix<T>& b, int first, int width, Sums<kColumns>& sums) {
  static_assert(kInner % 2 == 0 && kColumns % 2 == 0);
#pragma unroll
  for (int k = 0; k < kInner; k += 2) {
    unsigned of_a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_a[i] = pair_of<T>(weights[k + i / 2][i % 2 * 2], weights[k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      if (n * 8 % kPadding == 0 && first + n * 8 >= width) break;
      unsigned of_b[4];
      b.template as_b<true>(of_b, k * 8, first + n * 8);
      multiply_add<T>(sums[n], of_a, of_b[0], of_b[1]);
      multiply_add<T>(sums[n + 1], of_a, of_b[2], of_b[3]);
    }
  }
}

/// Hides scores of keys that row i of a thread's two does not see.
template <int kColumns>
__device__ void hide(Sums<kColumns>& scores, int i, const SeenKeys& sees) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!sees.has(column_of(n, e))) scores[n][i * 2 + e] = kHidden<float>;
}

/// Like add_tile of attention_softmax.h: turns the scores of row i of a thread's two into weights.
template <Hides kHides, int kColumns>
__device__ float add_tile(Softmax<float>& row, Sums<kColumns>& scores, int i, const Scale<kHides>& scale) {
  float largest = kHidden<float>;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
  for (int step = kSharers / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
  const float most = fmaxf(row.most, rounded_product(largest, scale.natural)), base = most == kHidden<float> ? 0.0f : most,
              shrink = power_of_2(rounded_product(row.most - base, kLog2E)), binary_base = rounded_product(base, kLog2E);
  row.most = most, row.total = rounded_product(row.total, shrink);
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = scores[n][i * 2 + e];
      x = power_of_2(fused_sum(x, scale.binary, -binary_base));
      row.total += x;
    }
  return shrink;
}

template <int kColumns>
__device__ void shrink_row(Sums<kColumns>& sums, int i, float by) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) sums[n][i * 2 + e] = rounded_product(sums[n][i * 2 + e], by);
}

/// Stores row i of a thread's two, times `scale`, to row `t` of a head.
template <class T, int kColumns>
__device__ void store_row(const Sums<kColumns>& sums, int i, float scale, const Heads& to, int64_t b, int64_t t, int64_t h) {
  T* row = static_cast<T*>(to.data) + to.offset(b, t, h);
  const bool in_pairs = reinterpret_cast<uintptr_t>(row) % (2 * sizeof(T)) == 0;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int at = column_of(n, 0);
    const float x = sums[n][i * 2] * scale, y = sums[n][i * 2 + 1] * scale;
    if (in_pairs && at + 1 < to.width) {
      *reinterpret_cast<unsigned*>(row + at) = pair_of<T>(x, y);
    } else {
      if (at < to.width) row[at] = element<T>(x);
      if (at + 1 < to.width) row[at + 1] = element<T>(y);
    }
  }
}

/// Calls f.operator()<T, W, E>() with the elements' type, bf16 or f16, and widths into which the call's heads and values fit.
template <class F>
void visit_call(const char* who, const View& q, const View& v, F&& f) {
  visit_widths(who, q, v, [&]<int kWidth, int kValueWidth>() {
    if (q.dtype == kBF16) f.template operator()<bf16, kWidth, kValueWidth>();
    else f.template operator()<f16, kWidth, kValueWidth>();
  });
}

}  // namespace sheaf::kernels::cuda::attention_tiles::fragments
