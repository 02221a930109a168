// A tile of a product of matrices, made by a block of 256 threads: pieces of the operands go to shared memory, one while others are
// multiplied, in bf16 and f16 by tensor cores. Whose operands they are the caller says, who copies them.
#pragma once

#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda::part_products {

inline constexpr int kThreads = 256, kWarps = kThreads / kWarp;

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % kWarp; }

/// How a product is cut: a block makes kRows x kColumns of the result, kInner of the sums at a time.
template <class T>
struct Tiling {
  static constexpr bool kTensorCores = kIsNarrow<T>;
  static constexpr int kRows = kTensorCores ? 128 : 64, kColumns = kTensorCores ? 128 : 64, kInner = kTensorCores ? 32 : 16;
};

/// An operand's piece in shared memory: kOuter lines along the sum's direction or across, 16 bytes more between them than needed, so
/// that lines begin in different banks.
template <class T, int kLines, int kLength>
struct Piece {
  static constexpr int kPitch = kLength + 16 / static_cast<int>(sizeof(T));
  T v[kLines][kPitch];
};

/// Sums of a block's threads: warps stand 2 x 4, and thread `lane` of one has, of its rows and columns, those that mma.m16n8 gives it.
template <class T>
struct Sums {
  using C = Compute<T>;
  using S = Tiling<T>;
  static constexpr int kWarpRows = S::kRows / 2, kWarpColumns = S::kColumns / 4, kM = kWarpRows / 16, kN = kWarpColumns / 8;
  C v[kM][kN][4] = {};

  __device__ static int row(int m, int i) {
    return static_cast<int>(threadIdx.x) / kWarp / 4 * kWarpRows + m * 16 + i / 2 * 8 + lane_of_thread() / 4;
  }
  __device__ static int column(int n, int i) {
    return static_cast<int>(threadIdx.x) / kWarp % 4 * kWarpColumns + n * 8 + lane_of_thread() % 4 * 2 + i % 2;
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

#if !SHEAF_CUDA_EMULATED

/// Four 8 x 8 matrices, whose rows begin where lanes 0 to 7, 8 to 15, .. say; transposed, if kTransposed.
template <bool kTransposed>
__device__ void load_matrices(unsigned (&to)[4], const void* row) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}

template <class T>
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// multiply() by mma.m16n8k16.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B>
__device__ void multiply_matrices(Sums<T>& sums, const A& a, const B& b) {
  using S = Tiling<T>;
  constexpr int kM = Sums<T>::kM, kN = Sums<T>::kN;
  const int lane = lane_of_thread(), row = lane % 8, matrix = lane / 8;
  const int first_row = Sums<T>::row(0, 0) - lane / 4, first_column = Sums<T>::column(0, 0) - lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < S::kInner; k += 16) {
    // Of a the matrices are rows 0 to 7 and 8 to 15 of elements 0 to 7, then of 8 to 15.
    unsigned of_a[kM][4], of_b[kN / 2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int r = first_row + m * 16 + matrix % 2 * 8, i = k + matrix / 2 * 8;
      if constexpr (kRowsInner) load_matrices<true>(of_a[m], &a.v[i + row][r]);
      else load_matrices<false>(of_a[m], &a.v[r + row][i]);
    }
    // Of b elements 0 to 7 and 8 to 15 of columns 0 to 7, then of 8 to 15.
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int c = first_column + n * 16 + matrix / 2 * 8, i = k + matrix % 2 * 8;
      if constexpr (kColumnsInner) load_matrices<true>(of_b[n], &b.v[i + row][c]);
      else load_matrices<false>(of_b[n], &b.v[c + row][i]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_add<T>(sums.v[m][n], of_a[m], of_b[n / 2][n % 2 * 2], of_b[n / 2][n % 2 * 2 + 1]);
  }
}

#endif

/// sums += a b of two pieces. a has kRows lines of kInner or, kRowsInner, kInner of kRows; b kColumns lines of kInner or, kColumnsInner,
/// kInner of kColumns.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B>
__device__ void multiply(Sums<T>& sums, const A& a, const B& b) {
  using S = Tiling<T>;
  using C = Compute<T>;
  constexpr int kM = Sums<T>::kM, kN = Sums<T>::kN;
#if !SHEAF_CUDA_EMULATED
  if constexpr (S::kTensorCores) return multiply_matrices<T, kRowsInner, kColumnsInner>(sums, a, b);
  else
#endif
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

/// 16 bytes of a piece: `count` elements, or as many of them as these have room for, that lie side by side at `from`, or `step` apart, zeros
/// behind them. kPacked: they begin at a multiple of 16 bytes, and all or none are there; they are on their way until arrived().
template <class T, bool kPacked>
__device__ void copy_pack(T* to, const T* from, int64_t count, int64_t step) {
  constexpr int kSize = Pack<T>::kSize;
  if constexpr (kPacked) {
#if !SHEAF_CUDA_EMULATED
    const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = count > 0 ? 16 : 0;  // the others of 16 become zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
#else
    store_pack(to, count > 0 ? load_pack(from) : Pack<T>{});
#endif
  } else {
#pragma unroll
    for (int k = 0; k < kSize; ++k) to[k] = k < count ? from[k * step] : element<T>(Compute<T>(0));
  }
}

/// All copies but those of the newest `left` rounds have arrived; then a barrier is due.
template <int kLeft>
__device__ void arrived() {
#if !SHEAF_CUDA_EMULATED
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}
__device__ inline void end_round() {
#if !SHEAF_CUDA_EMULATED
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// f(line, first element) for the packs of a piece, among the block's threads.
template <class T, int kLines, int kLength, class F>
__device__ void each_pack(F f) {
  constexpr int kSize = Pack<T>::kSize, kPacks = kLength / kSize;
#pragma unroll
  for (int n = threadIdx.x; n < kLines * kPacks; n += kThreads) f(n / kPacks, n % kPacks * kSize);
}

inline constexpr int kRounds = 3;  ///< pieces in shared memory: one is multiplied while others arrive

/// Multiplies `rounds` pieces: load(round, a, b) starts to copy one, without the end of its round.
template <class T, bool kRowsInner, bool kColumnsInner, class A, class B, class Load>
__device__ void multiply_rounds(Sums<T>& sums, int64_t rounds, A* a, B* b, Load load) {
  for (int64_t round = 0; round < kRounds - 1; ++round) {
    if (round < rounds) load(round, a[round], b[round]);
    end_round();
  }
  for (int64_t round = 0; round < rounds; ++round) {
    arrived<kRounds - 2>();
    __syncthreads();  // for all threads' copies, and until the piece that comes next has been read
    const int64_t next = round + kRounds - 1;
    if (next < rounds) load(next, a[next % kRounds], b[next % kRounds]);
    end_round();
    multiply<T, kRowsInner, kColumnsInner>(sums, a[round % kRounds], b[round % kRounds]);
  }
}

}  // namespace sheaf::kernels::cuda::part_products
