// Rows of bf16 as pairs, the order in which bf16 instructions expect the second operand of a product (Intel's VNNI order): row p of
// the pairs of x holds, for every column j, the words x[2p, j] and x[2p + 1, j] adjacently. For machines with AVX512_BF16.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "sheaf/core/dtype.h"
#include "sheaf/kernels/cpu/transpose.h"

namespace sheaf::kernels::cpu {

/// to[words][rows] = from[rows][words] of 32-bit words; both dense, sizes multiples of 16.
inline void transpose_words(const void* from, int64_t rows, int64_t words, void* to) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t w = 0; w < words; w += 16)
      transpose_words_16x16(static_cast<const char*>(from) + (r * words + w) * 4, words * 4,
                            static_cast<char*>(to) + (w * rows + r) * 4, rows * 4);
}

/// Thirty-two words of two rows, interleaved.
inline void interleave(__m512i even, __m512i odd, void* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512(static_cast<char*>(to) + 64, _mm512_permutex2var_epi16(even, high, odd));
}

/// to[rows / 2][width] of pairs, from rows of bf16; both dense, rows even, width a multiple of 32.
inline void pair_rows(const bf16* from, int64_t rows, int64_t width, void* to) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t d = 0; d < width; d += 32)
      interleave(_mm512_loadu_si512(from + r * width + d), _mm512_loadu_si512(from + (r + 1) * width + d),
                 static_cast<int32_t*>(to) + r / 2 * width + d);
}

/// Rounds 32 floats to bf16, to nearest even.
inline __m512i to_bf16(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

}  // namespace sheaf::kernels::cpu
