// Small products in registers, the inner loop of attention. Every element of C is one chain of fused multiply-adds over k = 0, 1, 2
// ..., in whichever tile it is: rows do not depend on their neighbours, and the bits are the same on every instruction set.
#pragma once

#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::cpu {

// Accumulators that fit the register file: 6 x 4 of 32 zmm, 4 x 1 (of two ymm each) of 16 ymm;
// doubles take twice that.
#ifdef __AVX512F__
template <class C>
inline constexpr int kTileRows = std::is_same_v<C, float> ? 6 : 4;
template <class C>
inline constexpr int kTileLanes = std::is_same_v<C, float> ? 4 : 2;
#else
template <class C>
inline constexpr int kTileRows = std::is_same_v<C, float> ? 6 : 2;
template <class C>
inline constexpr int kTileLanes = 1;
#endif

template <int kRows, int kVectors, class C>
SHEAF_INLINE void tile(int64_t depth, const C* a, int64_t a_row, int64_t a_col, const C* b,
                       int64_t ldb, C* c, int64_t ldc, bool accumulate) {
  using L = Lanes<C>;
  L acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n)
      acc[m][n] = accumulate ? L::load(c + m * ldc + n * kLanes) : L(C(0));
  }
  for (int64_t k = 0; k < depth; ++k) {
    L bk[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) bk[n] = L::load(b + k * ldb + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const L am(a[m * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) acc[m][n] = fma(am, bk[n], acc[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) acc[m][n].store(c + m * ldc + n * kLanes);
  }
}

template <int kVectors, class C>
inline void tile_column(int64_t rows, int64_t depth, const C* a, int64_t a_row, int64_t a_col,
                        const C* b, int64_t ldb, C* c, int64_t ldc, bool accumulate) {
  int64_t m = 0;
  for (; m + kTileRows<C> <= rows; m += kTileRows<C>)
    tile<kTileRows<C>, kVectors>(depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc,
                                 accumulate);
  if constexpr (kTileRows < C >> 2)
    for (; m + 2 <= rows; m += 2)
      tile<2, kVectors>(depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, accumulate);
  for (; m < rows; ++m)
    tile<1, kVectors>(depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, accumulate);
}

/// C[rows, cols] = (accumulate ? C : 0) + A[rows, depth] B[depth, cols]. A has any strides; B and C
/// have dense rows; cols is a multiple of 16.
template <class C>
inline void tile_gemm(int64_t rows, int64_t cols, int64_t depth, const C* a, int64_t a_row,
                      int64_t a_col, const C* b, int64_t ldb, C* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + kTileLanes<C> * kLanes <= cols; n += kTileLanes<C> * kLanes)
    tile_column<kTileLanes<C>>(rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, accumulate);
  if constexpr (kTileLanes < C >> 2)
    for (; n + 2 * kLanes <= cols; n += 2 * kLanes)
      tile_column<2>(rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, accumulate);
  for (; n < cols; n += kLanes)
    tile_column<1>(rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, accumulate);
}

}  // namespace sheaf::kernels::cpu
