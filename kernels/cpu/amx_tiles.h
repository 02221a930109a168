// Products of small blocks of bf16 by matrix tiles (AMX).
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "sheaf/kernels/cpu/bf16_pairs.h"

namespace sheaf::kernels::cpu::amx {

/// Configures this thread's tiles, 16 rows of 64 bytes, while it lives.
class Scope {
 public:
  Scope() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    // g++ 12 knows only that this reads the first eight bytes, and may drop the others.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Scope() { _tile_release(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

inline constexpr int64_t kProductRows = 32;

/// c[m, n] = (or +=) a[m, k] b[k, n]; a in rows, b in pairs, c f32. m, n and k are multiples of 32. Strides in bytes.
template <bool kAdd>
inline void product(int64_t m, int64_t n, int64_t k, const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                    float* c, int64_t c_stride) {
  const char *A = static_cast<const char*>(a), *B = static_cast<const char*>(b);
  char* C = reinterpret_cast<char*>(c);
  // g++ 12 does not know that a tile load reads memory: earlier writes must have happened.
  __asm__ volatile("" ::: "memory");
  for (int64_t i = 0; i < m; i += 32)
    for (int64_t j = 0; j < n; j += 32) {
      char *c0 = C + i * c_stride + j * 4, *c1 = c0 + 16 * c_stride;
      if constexpr (kAdd) {
        _tile_loadd(0, c0, c_stride);
        _tile_loadd(1, c0 + 64, c_stride);
        _tile_loadd(2, c1, c_stride);
        _tile_loadd(3, c1 + 64, c_stride);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t l = 0; l < k; l += 32) {
        const char *a0 = A + i * a_stride + l * 2, *b0 = B + l / 2 * b_stride + j * 4;
        _tile_loadd(4, a0, a_stride);
        _tile_loadd(6, b0, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b0 + 64, b_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a0 + 16 * a_stride, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, c_stride);
      _tile_stored(1, c0 + 64, c_stride);
      _tile_stored(2, c1, c_stride);
      _tile_stored(3, c1 + 64, c_stride);
    }
  __asm__ volatile("" ::: "memory");
}

}  // namespace sheaf::kernels::cpu::amx
