// Products of 64 x 64 tiles in shared memory, by a block of 256 threads: all matrices of the delta rule are cut into such tiles, with
// zeros past their ends.
//
// In f32 and f64 products are computed by multiply-adds. For bf16 and f16, tensor cores compute them from each factor's two bf16
// parts, which together have 16 of its bits: three products for one, with f32 sums.
#pragma once

#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/tensor_cores.h"

namespace sheaf::kernels::cuda::delta {

inline constexpr int kThreads = 256, kTile = 64;

/// In f32 rows begin in different banks. In f64 there is no room for that padding with the largest states.
template <class C>
struct Tile {
  static constexpr int kPitch = sizeof(C) == 4 ? kTile + 4 : kTile;
  alignas(16) C v[kTile][kPitch];

  __device__ C get(int i, int j) const { return v[i][j]; }
  template <int kCount>
  __device__ void put(int i, int j, const C (&x)[kCount]) {
    constexpr int kSize = Pack<C>::kSize < kCount ? Pack<C>::kSize : kCount;
#pragma unroll
    for (int k = 0; k < kCount; k += kSize) {
      Group<C, kSize> group;
#pragma unroll
      for (int m = 0; m < kSize; ++m) group.v[m] = x[k + m];
      *reinterpret_cast<Group<C, kSize>*>(&v[i][j + k]) = group;
    }
  }
};

/// A tile of bf16 parts, in pairs of neighbours: each element as bf16, and the remainder, as bf16 too.
struct Parts {
  static constexpr int kPitch = kTile + 8;  ///< elements
  alignas(16) unsigned high[kTile][kPitch / 2], low[kTile][kPitch / 2];

  __device__ SharedMatrix<bf16> matrix_of_high() const { return {reinterpret_cast<const bf16*>(high), kPitch}; }
  __device__ SharedMatrix<bf16> matrix_of_low() const { return {reinterpret_cast<const bf16*>(low), kPitch}; }
  __device__ static float value(unsigned pair, int j) { return __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16); }
  __device__ float get(int i, int j) const { return value(high[i][j / 2], j) + value(low[i][j / 2], j); }
  template <int kCount>
  __device__ void put(int i, int j, const float (&x)[kCount]) {
    using Pairs = Group<unsigned, kCount / 2>;
    Pairs of_high, of_low;
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      const unsigned pair = pair_of<bf16>(x[k], x[k + 1]);
      of_high.v[k / 2] = pair;
      of_low.v[k / 2] = pair_of<bf16>(x[k] - value(pair, 0), x[k + 1] - value(pair, 1));
    }
    *reinterpret_cast<Pairs*>(&high[i][j / 2]) = of_high;
    *reinterpret_cast<Pairs*>(&low[i][j / 2]) = of_low;
  }
};

/// A factor of products. Once it has been read, its memory may hold a tile of numbers.
template <class T>
using Factor = std::conditional_t<kIsNarrow<T>, Parts, Tile<Compute<T>>>;
static_assert(sizeof(Parts) >= sizeof(Tile<float>));

/// A thread's elements of a tile being loaded from memory: all are requested before the first is awaited, and a product can be
/// computed meanwhile.
template <class C, class T>
class Arriving {
 public:
  /// The first `width` elements of rows [0, count) of a matrix: row r begins at `row(r)` and is multiplied by `factor(r)`.
  template <class Row, class By>
  __device__ Arriving(int64_t count, int64_t width, Row row, By factor) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const bool there = line(n) < count;
      packs_[n] = there ? load_raw(row(line(n)), column(), width) : uint4{};
      factors_[n] = there ? factor(line(n)) : C(0);
    }
  }
  template <class To>
  __device__ void store(To& tile) const {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      C wide[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) wide[k] = convert_to<C>(element_of<T>(packs_[n], k)) * factors_[n];
      tile.put(line(n), column(), wide);
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

/// A thread's elements of a product of tiles, 4 x 4: with tensor cores those that mma.m16n8 assigns to it, with warps arranged 2 x 4;
/// else neighbours.
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
  /// The index of this thread among the 16 that share a row.
  __device__ static int sharer() {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / kWarp % 4 * 4 + thread % 4 : thread % 16;
  }
  /// Stores f(i, row, column, sum) of each element to a tile.
  template <class To, class F>
  __device__ void put(To& to, F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const C pair[2] = {f(i, row(i), column(j), at(i, j)), f(i, row(i), column(j) + 1, at(i, j + 1))};
        to.put(row(i), column(j), pair);
      }
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

/// multiply() by tensor cores.
template <bool kRowsInner, bool kColumnsInner, class T>
__device__ void multiply_by_parts(Sums<T>& sums, const Parts& a, const Parts& b) {
  const int lane = lane_of_thread(), row = Sums<T>::row(0) - lane / 4, column = Sums<T>::column(0) - lane % 4 * 2;
  const SharedMatrix<bf16> high = a.matrix_of_high(), low = a.matrix_of_low(), b_high = b.matrix_of_high(), b_low = b.matrix_of_low();
#pragma unroll 2  // with more, sums are spilled
  for (int k = 0; k < kTile; k += 16) {
    unsigned of_high[2][4], of_low[2][4], of_b_high[4], of_b_low[4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int r = row + m * 16;
      high.template as_a<kRowsInner>(of_high[m], kRowsInner ? k : r, kRowsInner ? r : k);
      low.template as_a<kRowsInner>(of_low[m], kRowsInner ? k : r, kRowsInner ? r : k);
    }
    b_high.template as_b<kColumnsInner>(of_b_high, kColumnsInner ? k : column, kColumnsInner ? column : k);
    b_low.template as_b<kColumnsInner>(of_b_low, kColumnsInner ? k : column, kColumnsInner ? column : k);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_add<bf16>(sums.v[m][n], of_low[m], of_b_high[n * 2], of_b_high[n * 2 + 1]);
        multiply_add<bf16>(sums.v[m][n], of_high[m], of_b_low[n * 2], of_b_low[n * 2 + 1]);
        multiply_add<bf16>(sums.v[m][n], of_high[m], of_b_high[n * 2], of_b_high[n * 2 + 1]);
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
template <bool kRowsInner, bool kColumnsInner, class T>
__device__ void multiply(Sums<T>& sums, const Factor<T>& a, const Factor<T>& b) {
  using C = Compute<T>;
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
