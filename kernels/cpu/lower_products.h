// Products with lower triangular matrices of a chunk, in blocks of kLanes rows: what is above the diagonal is neither read nor written,
// except in blocks on the diagonal, where factors must hold zeros.
//
//   L, N: [n, n], rows kDeltaChunk apart   B, C, D, U, X, Y: [n, columns], dense, columns a multiple of kLanes
#pragma once

#include "sheaf/kernels/cpu/tile_gemm.h"
#include "sheaf/kernels/delta_rule.h"

namespace sheaf::kernels::cpu {

/// C = (accumulate ? C : 0) + L B.
template <class T>
void lower_product(int64_t n, int64_t columns, const T* l, const T* b, T* c, bool accumulate) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t end = std::min(i + kLanes, n);
    tile_gemm<T>(end - i, columns, end, l + i * kDeltaChunk, kDeltaChunk, 1, b, columns, c + i * columns, columns, accumulate);
  }
}

/// C = (accumulate ? C : 0) + Lᵀ B.
template <class T>
void lower_transposed_product(int64_t n, int64_t columns, const T* l, const T* b, T* c, bool accumulate) {
  for (int64_t i = 0; i < n; i += kLanes)
    tile_gemm<T>(std::min(kLanes + i, n) - i, columns, n - i, l + i * kDeltaChunk + i, 1, kDeltaChunk, b + i * columns, columns,
                 c + i * columns, columns, accumulate);
}

/// L = A B, A[n, depth] with rows a_row apart, B[depth, kDeltaChunk]. Blocks on the diagonal are written whole.
template <class T>
void product_to_lower(int64_t n, int64_t depth, const T* a, int64_t a_row, const T* b, T* l) {
  for (int64_t i = 0; i < n; i += kLanes)
    tile_gemm<T>(std::min(kLanes + i, n) - i, i + kLanes, depth, a + i * a_row, a_row, 1, b, kDeltaChunk, l + i * kDeltaChunk, kDeltaChunk,
                 false);
}

/// D = D + N U with U = beta D, N strictly lower triangular: row by row within a block, by products between blocks.
template <class T>
void solve_lower(int64_t n, int64_t columns, const T* l, const T* beta, T* d, T* u) {
  for (int64_t first = 0; first < n; first += kLanes) {
    const int64_t end = std::min(first + kLanes, n);
    tile_gemm<T>(end - first, columns, first, l + first * kDeltaChunk, kDeltaChunk, 1, u, columns, d + first * columns, columns, true);
    for (int64_t c = 0; c < columns; c += kLanes)
      for (int64_t i = first; i < end; ++i) {
        Lanes<T> sum = Lanes<T>::load(d + i * columns + c);
        for (int64_t j = first; j < i; ++j) sum = fma(Lanes<T>(l[i * kDeltaChunk + j]), Lanes<T>::load(u + j * columns + c), sum);
        sum.store(d + i * columns + c);
        (Lanes<T>(beta[i]) * sum).store(u + i * columns + c);
      }
  }
}

/// X = X + Nᵀ Y with Y = beta X, from the last row on.
template <class T>
void solve_lower_transposed(int64_t n, int64_t columns, const T* l, const T* beta, T* x, T* y) {
  for (int64_t first = (n - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
    const int64_t end = std::min(first + kLanes, n);
    tile_gemm<T>(end - first, columns, n - end, l + end * kDeltaChunk + first, 1, kDeltaChunk, y + end * columns, columns,
                 x + first * columns, columns, true);
    for (int64_t c = 0; c < columns; c += kLanes)
      for (int64_t i = end; i-- > first;) {
        Lanes<T> sum = Lanes<T>::load(x + i * columns + c);
        for (int64_t j = i + 1; j < end; ++j) sum = fma(Lanes<T>(l[j * kDeltaChunk + i]), Lanes<T>::load(y + j * columns + c), sum);
        sum.store(x + i * columns + c);
        (Lanes<T>(beta[i]) * sum).store(y + i * columns + c);
      }
  }
}

}  // namespace sheaf::kernels::cpu
