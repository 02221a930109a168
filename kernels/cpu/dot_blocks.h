// Products of small blocks of bf16 by vectors of pairs (AVX512_BF16).
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "sheaf/kernels/cpu/bf16_pairs.h"
#include "sheaf/kernels/cpu/inline.h"

namespace sheaf::kernels::cpu::dot {

/// Per-thread setup for products: nothing, unlike for tiles.
struct Scope {
  Scope() {}
};

/// sum + x * y over pairs. Without the asm, g++ 12 moves the sums of an unrolled loop from register to register.
SHEAF_INLINE __m512 add_product(__m512 sum, __m512i x, __m512i y) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

inline constexpr int kRows = 8;  ///< with two vectors each: 16 sums in registers

/// to[8, 32] = (from or 0) + a b, all of f32, over `steps` times 32 of the depth. a: rows of bf16, a_stride bytes apart,
/// 64 bytes in a step, `a_step` bytes from step to step; b: pairs, rows b_stride bytes apart.
inline void multiply_rows(int64_t steps, const char* a, int64_t a_stride, int64_t a_step, const char* b, int64_t b_stride,
                          const char* from, int64_t from_stride, char* to, int64_t to_stride) {
  __m512 sums[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = _mm512_setzero_ps(), sums[r][1] = _mm512_setzero_ps();
    if (!from) continue;
    sums[r][0] = _mm512_loadu_ps(from + r * from_stride);
    sums[r][1] = _mm512_loadu_ps(from + r * from_stride + 64);
  }
  for (int64_t s = 0; s < steps; ++s, a += a_step)
    for (int pair = 0; pair < 16; ++pair, b += b_stride) {
      const __m512i left = _mm512_loadu_si512(b), right = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t word;
        std::memcpy(&word, a + r * a_stride + pair * 4, 4);
        const __m512i x = _mm512_set1_epi32(word);
        sums[r][0] = add_product(sums[r][0], x, left), sums[r][1] = add_product(sums[r][1], x, right);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(to + r * to_stride, sums[r][0]);
    _mm512_storeu_ps(to + r * to_stride + 64, sums[r][1]);
  }
}

inline constexpr int64_t kProductRows = kRows;

/// c[m, n] = (or +=) a[m, k] b[k, n]; a in rows, b in pairs, c f32. m is a multiple of 8, n and k are of 32. Strides in bytes.
template <bool kAdd>
inline void product(int64_t m, int64_t n, int64_t k, const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                    float* c, int64_t c_stride) {
  const char *A = static_cast<const char*>(a), *B = static_cast<const char*>(b);
  char* C = reinterpret_cast<char*>(c);
  for (int64_t j = 0; j < n; j += 32)
    for (int64_t i = 0; i < m; i += kRows) {
      char* to = C + i * c_stride + j * 4;
      multiply_rows(k / 32, A + i * a_stride, a_stride, 64, B + j * 4, b_stride, kAdd ? to : nullptr, c_stride, to, c_stride);
    }
}

}  // namespace sheaf::kernels::cpu::dot
