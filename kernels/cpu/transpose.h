// The transpose of sixteen rows of sixteen 32-bit values in registers, for whatever packs a matrix against its grain.
#pragma once

#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::cpu {

#ifdef __AVX512F__
SHEAF_INLINE void transpose(Lanes<float> (&x)[kLanes]) {
  __m512 s[16], r[16];
  for (int i = 0; i < 8; ++i)
    s[2 * i] = _mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v),
          s[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v);
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      r[4 * i + 2 * j] = _mm512_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0x44);
      r[4 * i + 2 * j + 1] = _mm512_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0xee);
    }
  // r[4 i + c] holds, in its four 128-bit parts p, column 4 p + c of rows 4 i .. 4 i + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), high01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88),
                 high23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    x[c].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    x[4 + c].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    x[8 + c].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    x[12 + c].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}
#else
/// Eight rows of eight, each the half H of a row of lanes.
template <__m256 Lanes<float>::*kHalf>
SHEAF_INLINE void transpose_8x8(Lanes<float>* x) {
  __m256 r[8], s[8];
  for (int i = 0; i < 4; ++i)
    s[2 * i] = _mm256_unpacklo_ps(x[2 * i].*kHalf, x[2 * i + 1].*kHalf),
          s[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i].*kHalf, x[2 * i + 1].*kHalf);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      r[4 * i + 2 * j] = _mm256_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0x44);
      r[4 * i + 2 * j + 1] = _mm256_shuffle_ps(s[4 * i + j], s[4 * i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    x[i].*kHalf = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    x[i + 4].*kHalf = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}
SHEAF_INLINE void transpose(Lanes<float> (&x)[kLanes]) {
  for (int half : {0, 8}) transpose_8x8<&Lanes<float>::l>(x + half), transpose_8x8<&Lanes<float>::h>(x + half);
  for (int i = 0; i < 8; ++i) std::swap(x[i].h, x[i + 8].l);
}
#endif

inline void transpose(Lanes<double> (&x)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) std::swap(x[i].v[j], x[j].v[i]);
}

}  // namespace sheaf::kernels::cpu
