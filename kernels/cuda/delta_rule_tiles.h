// Products of 64 x 64 tiles in shared memory, by a block of 256 threads: all matrices of the delta rule are cut to such tiles, with zeros
// past their ends.
//
// Tiles are f32 (f64 for f64). In f32 and f64 products are made by multiply-adds. For bf16 and f16 tensor cores make them of each
// factor's two bf16 parts, which together have 16 of its bits: three products for one, whose sums are f32.
#pragma once

#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/tensor_cores.h"

namespace sheaf::kernels::cuda::delta {

inline constexpr int kThreads = 256, kTile = 64;

/// In f32 rows begin in different banks. In f64 there is no room for that, where states are largest.
template <class C>
struct Tile {
  static constexpr int kPitch = sizeof(C) == 4 ? kTile + 4 : kTile;
  alignas(16) C v[kTile][kPitch];
};

/// A thread's elements of a tile that are on their way from memory: all are asked for before the first is waited for, and a product can be
/// made meanwhile.
template <class C, class T>
class Arriving {
 public:
  /// Rows [0, count) of a matrix, of each the first `width` elements: `row(r)` is where one begins, which is multiplied by `factor(r)`.
  template <class Row, class Factor>
  __device__ Arriving(int64_t count, int64_t width, Row row, Factor factor) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const bool there = line(n) < count;
      packs_[n] = there ? load_raw(row(line(n)), column(), width) : uint4{};
      factors_[n] = there ? factor(line(n)) : C(0);
    }
  }
  __device__ void store(Tile<C>& tile) const {
#pragma unroll
    for (int n = 0; n < kEach; ++n)
#pragma unroll
      for (int k = 0; k < kSize; k += Pack<C>::kSize) {
        Pack<C> wide;
#pragma unroll
        for (int m = 0; m < Pack<C>::kSize; ++m) wide.v[m] = convert_to<C>(element_of<T>(packs_[n], k + m)) * factors_[n];
        store_pack(&tile.v[line(n)][column() + k], wide);
      }
  }

 private:
  static constexpr int kSize = Pack<T>::kSize, kPacks = kTile / kSize, kEach = kTile * kPacks / kThreads;
  __device__ static int line(int n) { return static_cast<int>(threadIdx.x) / kPacks + n * (kThreads / kPacks); }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kPacks * kSize; }

  uint4 packs_[kEach];
  C factors_[kEach];
};

/// Rows of a dense matrix of the workspace.
template <class C>
__device__ Arriving<C, C> rows(const C* from, int64_t pitch, int64_t count, int64_t width) {
  return {count, width, [&](int r) { return from + r * pitch; }, [](int) { return C(1); }};
}

/// A thread's elements of a product of tiles, 4 x 4: with tensor cores those that mma.m16n8 gives it, of warps that stand 2 x 4; else
/// neighbours.
template <class T>
struct Sums {
  using C = Compute<T>;
  static constexpr bool kTensorCores = kIsNarrow<T>;
  C v[2][2][4] = {};

  __device__ C& at(int i, int j) { return v[i / 2][j / 2][i % 2 * 2 + j % 2]; }
  __device__ static int row(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / (4 * kWarp) * 32 + i * 8 + thread % kWarp / 4 : thread / 16 * 4 + i;
  }
  __device__ static int column(int j) {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / kWarp % 4 * 16 + j / 2 * 8 + thread % 4 * 2 + j % 2 : thread % 16 * 4 + j;
  }
  /// Which of the 16 threads that share a row this is.
  __device__ static int sharer() {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / kWarp % 4 * 4 + thread % 4 : thread % 16;
  }
  /// f(i, row, column, sum) for each; i < 4 is the number of the row.
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(i, row(i), column(j), at(i, j));
  }
};

/// x and y as bf16, and what that leaves of them.
__device__ inline void split(float x, float y, unsigned& high, unsigned& low) {
  high = pair_of<bf16>(x, y);
  low = pair_of<bf16>(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

/// multiply() by tensor cores.
template <bool kRowsInner, bool kColumnsInner, class T>
__device__ void multiply_by_parts(Sums<T>& sums, const Tile<float>& a, const Tile<float>& b) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
  for (int k = lane % 4 * 2; k < kTile; k += 16) {
    unsigned a_high[2][4], a_low[2][4], b_high[2][2], b_low[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int r = Sums<T>::row(m * 2 + n % 2), at = k + n / 2 * 8;
        if constexpr (kRowsInner) split(a.v[at][r], a.v[at + 1][r], a_high[m][n], a_low[m][n]);
        else split(a.v[r][at], a.v[r][at + 1], a_high[m][n], a_low[m][n]);
      }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = Sums<T>::column(m * 2) - lane % 4 * 2 + lane / 4, at = k + n * 8;
        if constexpr (kColumnsInner) split(b.v[at][c], b.v[at + 1][c], b_high[m][n], b_low[m][n]);
        else split(b.v[c][at], b.v[c][at + 1], b_high[m][n], b_low[m][n]);
      }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_add<bf16>(sums.v[m][n], a_low[m], b_high[n][0], b_high[n][1]);
        multiply_add<bf16>(sums.v[m][n], a_high[m], b_low[n][0], b_low[n][1]);
        multiply_add<bf16>(sums.v[m][n], a_high[m], b_high[n][0], b_high[n][1]);
      }
  }
}

template <class C>
__device__ void load_four(C (&to)[4], const C* from) {
  constexpr int kSize = Pack<C>::kSize;
#pragma unroll
  for (int n = 0; n < 4; n += kSize) {
    const Pack<C> pack = load_pack(from + n);
#pragma unroll
    for (int m = 0; m < kSize; ++m) to[n + m] = pack.v[m];
  }
}

/// sums += a b. Rows of the product are a's rows or, kRowsInner, its columns; columns are b's rows or, kColumnsInner, its columns.
template <bool kRowsInner, bool kColumnsInner, class T, class C>
__device__ void multiply(Sums<T>& sums, const Tile<C>& a, const Tile<C>& b) {
  if constexpr (Sums<T>::kTensorCores) {
    multiply_by_parts<kRowsInner, kColumnsInner>(sums, a, b);
  } else {
    const int row = Sums<T>::row(0), column = Sums<T>::column(0);
#pragma unroll 1
    for (int k = 0; k < kTile; k += 4) {
      C x[4][4], y[4][4];  // by lines of the tiles
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_four(x[n], kRowsInner ? &a.v[k + n][row] : &a.v[row + n][k]);
        load_four(y[n], kColumnsInner ? &b.v[k + n][column] : &b.v[column + n][k]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sums.at(i, j) = fused_sum(kRowsInner ? x[n][i] : x[i][n], kColumnsInner ? y[n][j] : y[j][n], sums.at(i, j));
    }
  }
}

}  // namespace sheaf::kernels::cuda::delta
