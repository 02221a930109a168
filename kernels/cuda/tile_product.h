// A tile of a matrix product, computed by a block of 256 threads: pieces of the operands are copied to shared memory, some while
// others are multiplied, in bf16 and f16 by tensor cores. The caller copies the operands' pieces.
#pragma once

#include "sheaf/kernels/cuda/tensor_cores.h"

namespace sheaf::kernels::cuda::part_products {

inline constexpr int kThreads = 256, kWarps = kThreads / kWarp;

/// How a product is divided: a block computes kRows x kColumns of the result, kInner terms of the sums at a time.
template <class T>
struct Tiling {
  static constexpr bool kTensorCores = kIsNarrow<T>;
  static constexpr int kRows = kTensorCores ? 128 : 64, kColumns = kTensorCores ? 128 : 64, kInner = kTensorCores ? 64 : 16;
};

/// An operand's piece in shared memory: kLines lines along the summed dimension or across it, with 16 bytes of padding, so that lines
/// begin in different banks.
template <class T, int kLines, int kLength>
struct Piece {
  static constexpr int kPitch = kLength + 16 / static_cast<int>(sizeof(T));
  T v[kLines][kPitch];
};

/// Sums of a block's threads: warps are arranged 2 x 4, and thread `lane` of one has those of its rows and columns that mma.m16n8
/// assigns to it.
template <class T>
struct Sums {
  using C = Compute<T>;
  using S = Tiling<T>;
  static constexpr int kWarpRows = S::kRows / 2, kWarpColumns = S::kColumns / 4, kM = kWarpRows / 16, kN = kWarpColumns / 8;
  C v[kM][kN][4] = {};

  __device__ static int row(int m, int i) {
    return warp_of_thread() / 4 * kWarpRows + m * 16 + i / 2 * 8 + lane_of_thread() / 4;
  }
  __device__ static int column(int n, int i) {
    return warp_of_thread() % 4 * kWarpColumns + n * 8 + lane_of_thread() % 4 * 2 + i % 2;
  }
  /// f(row, column, sum) for those of this thread.
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(row(m, i), column(n, i), v[m][n][i]);
  }
};

/// multiply() by tensor cores.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B>
__device__ void multiply_matrices(Sums<T>& sums, const A& a, const B& b) {
  using S = Tiling<T>;
  constexpr int kM = Sums<T>::kM, kN = Sums<T>::kN;
  const int lane = lane_of_thread(), first_row = Sums<T>::row(0, 0) - lane / 4, first_column = Sums<T>::column(0, 0) - lane % 4 * 2;
  const SharedMatrix<T> rows{a.v[0], A::kPitch}, columns{b.v[0], B::kPitch};
#pragma unroll
  for (int k = 0; k < S::kInner; k += 16) {
    unsigned of_a[kM][4], of_b[kN / 2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int r = first_row + m * 16;
      rows.template as_a<kRowsInner>(of_a[m], kRowsInner ? k : r, kRowsInner ? r : k);
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int c = first_column + n * 16;
      columns.template as_b<kColumnsInner>(of_b[n], kColumnsInner ? k : c, kColumnsInner ? c : k);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_add<T>(sums.v[m][n], of_a[m], of_b[n / 2][n % 2 * 2], of_b[n / 2][n % 2 * 2 + 1]);
  }
}

/// sums += a b of two pieces. a has kRows lines of kInner or, kRowsInner, kInner of kRows; b kColumns lines of kInner or, kColumnsInner,
/// kInner of kColumns.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B>
__device__ void multiply(Sums<T>& sums, const A& a, const B& b) {
  using S = Tiling<T>;
  using C = Compute<T>;
  constexpr int kM = Sums<T>::kM, kN = Sums<T>::kN;
  if constexpr (S::kTensorCores) return multiply_matrices<T, kRowsInner, kColumnsInner>(sums, a, b);
  else
  for (int k = 0; k < S::kInner; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = Sums<T>::row(m, i), c = Sums<T>::column(n, i);
          const C x = convert_to<C>(kRowsInner ? a.v[k][r] : a.v[r][k]), y = convert_to<C>(kColumnsInner ? b.v[k][c] : b.v[c][k]);
          sums.v[m][n][i] += x * y;
        }
}

/// 16 bytes of a piece: `count` elements, or as many of them as fit, at `from`, adjacent or `step` apart, then zeros. kPacked: they
/// begin at a multiple of 16 bytes, and all or none exist; they are in flight until arrived().
template <class T, bool kPacked>
__device__ void copy_pack(T* to, const T* from, int64_t count, int64_t step) {
  constexpr int kSize = Pack<T>::kSize;
  if constexpr (kPacked) {
    copy_beside(to, from, count > 0);
  } else {
#pragma unroll
    for (int k = 0; k < kSize; ++k) to[k] = k < count ? from[k * step] : element<T>(Compute<T>(0));
  }
}

/// The packs of a piece that a thread copies: kEach lines, the pack at the same offset of each.
template <class T, int kLines, int kLength>
struct Share {
  static constexpr int kSize = Pack<T>::kSize, kPacks = kLength / kSize, kApart = kThreads / kPacks, kEach = kLines / kApart;
  static_assert(kThreads % kPacks == 0 && kLines % kApart == 0);
  __device__ static int line(int n) { return static_cast<int>(threadIdx.x) / kPacks + n * kApart; }
  __device__ static int element() { return static_cast<int>(threadIdx.x) % kPacks * kSize; }
};

inline constexpr int kRounds = 3;  ///< pieces in shared memory: one is multiplied while others arrive

/// Multiplies `rounds` pieces: load(round, a, b) starts to copy one, without ending its round.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B, class Load>
__device__ void multiply_rounds(Sums<T>& sums, int64_t rounds, A* a, B* b, Load load) {
  for (int64_t round = 0; round < kRounds - 1; ++round) {
    if (round < rounds) load(round, a[round], b[round]);
    end_round();
  }
  for (int64_t round = 0; round < rounds; ++round) {
    arrived<kRounds - 2>();
    __syncthreads();  // for all threads' copies, and until the piece to be overwritten next has been read
    const int64_t next = round + kRounds - 1;
    if (next < rounds) load(next, a[next % kRounds], b[next % kRounds]);
    end_round();
    multiply<T, kRowsInner, kColumnsInner>(sums, a[round % kRounds], b[round % kRounds]);
  }
}

}  // namespace sheaf::kernels::cuda::part_products
