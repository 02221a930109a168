// The transpose of 16 x 16 values, for code that packs a matrix across its dense dimension.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "sheaf/kernels/cpu/inline.h"

namespace sheaf::kernels::cpu {

/// to[16][16] = the transpose of from[16][16], of 32 bits each (floats, integers, pairs of bf16). Strides in bytes; nothing
/// need be aligned.
#ifdef __AVX512F__
SHEAF_INLINE void transpose_words_16x16(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  const char* f = static_cast<const char*>(from);
  char* t = static_cast<char*>(to);
  // Rows that far apart map to one or two sets of the first-level cache, which cannot hold 16 of them: each is read once.
  alignas(64) char rows[16 * 64];
  if (from_stride % 2048 == 0) {
    for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(rows + i * 64, _mm512_loadu_si512(f + i * from_stride));
    f = rows, from_stride = 64;
  }
  for (int64_t part = 0; part < 4; ++part, f += 16) {
    // Half of the work is done by loads, which use other ports than shuffles: 128 bits of rows n, 4 + n, 8 + n, 12 + n.
    __m512i r[4];
    for (int64_t n = 0; n < 4; ++n) {
      const auto row = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(f + i * from_stride)); };
      r[n] = _mm512_castsi128_si512(row(n));
      r[n] = _mm512_inserti32x4(r[n], row(4 + n), 1);
      r[n] = _mm512_inserti32x4(r[n], row(8 + n), 2);
      r[n] = _mm512_inserti32x4(r[n], row(12 + n), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), high01 = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
    for (const __m512i column : {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                                 _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)})
      _mm512_storeu_si512(t, column), t += to_stride;
  }
}
#else
SHEAF_INLINE void transpose_8x8(const char* from, int64_t from_stride, char* to, int64_t to_stride) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_stride));
  for (int i = 0; i < 4; ++i)
    s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]),
          s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      r[4 * i + 2 * j] = _mm256_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0x44);
      r[4 * i + 2 * j + 1] = _mm256_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i * to_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * to_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
SHEAF_INLINE void transpose_words_16x16(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  for (int64_t i : {0, 8})
    for (int64_t j : {0, 8})
      transpose_8x8(static_cast<const char*>(from) + i * from_stride + j * 4, from_stride,
                    static_cast<char*>(to) + j * to_stride + i * 4, to_stride);
}
#endif

/// The same for either compute type; strides in elements.
SHEAF_INLINE void transpose_16x16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  transpose_words_16x16(from, from_stride * 4, to, to_stride * 4);
}
SHEAF_INLINE void transpose_16x16(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
  for (int64_t i = 0; i < 16; ++i)
    for (int64_t j = 0; j < 16; ++j) to[j * to_stride + i] = from[i * from_stride + j];
}

}  // namespace sheaf::kernels::cpu
