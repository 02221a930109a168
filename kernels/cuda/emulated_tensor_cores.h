// The emulated GPU's versions of the instructions in tensor_cores.h, under the same names.
#pragma once

#include <cmath>

#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda {
namespace emulation {

/// Rounds to f32 towards zero, as tensor cores round their sums (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor
/// cores, https://doi.org/10.7717/peerj-cs.330).
inline float towards_zero(double x) {
  const auto nearest = static_cast<float>(x);
  if (!std::isfinite(nearest) || std::fabs(double{nearest}) <= std::fabs(x)) return nearest;
  return __uint_as_float(__float_as_uint(nearest) - 1);
}

}  // namespace emulation

template <class T>
unsigned pair_of(float x, float y) {
  return narrow<T>(x).bits | static_cast<unsigned>(narrow<T>(y).bits) << 16;
}

template <bool kTransposed>
void load_matrices(unsigned (&to)[4], const void* row) {
  const int lane = emulation::lane();
  const auto given = emulation::from_lanes(static_cast<const uint4*>(row));
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto element = [&](int r, int c) {
      const uint4 line = *given[matrix * 8 + r];  // all of it: it must be aligned
      const unsigned pair = c < 2 ? line.x : c < 4 ? line.y : c < 6 ? line.z : line.w;
      return c % 2 ? pair >> 16 : pair & 0xffffu;
    };
    const int r = lane / 4, c = lane % 4 * 2;
    to[matrix] = kTransposed ? element(c, r) | element(c + 1, r) << 16 : element(r, c) | element(r, c + 1) << 16;
  }
}

template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Given {
    unsigned a[4], b[2];
  };
  const auto given = emulation::from_lanes(Given{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int row = emulation::lane() / 4, column = emulation::lane() % 4 * 2;
  float rows[2][16], columns[2][16];  // 8 apart, and neighbours
  const auto widen_pair = [](unsigned pair, float* to) {
    for (const int half : {0, 1}) {
      T x;
      x.bits = static_cast<uint16_t>(pair >> 16 * half);
      to[half] = widen(x);
    }
  };
  for (int k = 0; k < 16; k += 2) {
    const Given of_row = given[row * 4 + k % 8 / 2];
    for (const int n : {0, 1}) {
      widen_pair(of_row.a[n + k / 8 * 2], rows[n] + k);
      widen_pair(given[(column + n) * 4 + k % 8 / 2].b[k / 8], columns[n] + k);
    }
  }
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 16; ++k) sum += double{rows[i / 2][k]} * double{columns[i % 2][k]};
    c[i] = emulation::towards_zero(sum);
  }
}

// The contents of shared memory are undefined while a copy is in flight: here NaN.
inline void copy_beside(void* to, const void* from, bool there) {
  *static_cast<uint4*>(to) = {~0u, ~0u, ~0u, ~0u};
  emulation::add_copy({to, from, there});
}
inline void end_round() { emulation::end_round(); }
template <int kLeft>
void arrived() {
  for (emulation::Copy copy{}; emulation::take_copy(kLeft, copy);)
    *static_cast<uint4*>(copy.to) = copy.there ? *static_cast<const uint4*>(copy.from) : uint4{};
}

}  // namespace sheaf::kernels::cuda
