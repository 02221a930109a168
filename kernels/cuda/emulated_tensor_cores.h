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

namespace emulation {

struct Operands {  // a lane's, of multiply_add()
  unsigned a[4], b[2];
  float c[4];
};
struct Sums {
  float c[4];
};

// c + a b of a whole warp: a lane's share of each matrix is described in tensor_cores.h. Sums are in f64, in the order of k.
template <class T>
void multiply_tile(const Operands (&in)[32], Sums (&out)[32]) {
  using Half [[gnu::vector_size(4 * sizeof(double))]] = double;  // of a row of b or c
  double a[16][16], b[16][8], c[16][8];
  const auto widen_pair = [](unsigned pair, double& x, double& y) {
    T low, high;
    low.bits = static_cast<uint16_t>(pair), high.bits = static_cast<uint16_t>(pair >> 16);
    x = widen(low), y = widen(high);
  };
  for (int i = 0; i < 32; ++i) {
    const int row = i / 4, column = i % 4 * 2;
    const Operands& given = in[i];
    widen_pair(given.a[0], a[row][column], a[row][column + 1]);
    widen_pair(given.a[1], a[row + 8][column], a[row + 8][column + 1]);
    widen_pair(given.a[2], a[row][column + 8], a[row][column + 9]);
    widen_pair(given.a[3], a[row + 8][column + 8], a[row + 8][column + 9]);
    widen_pair(given.b[0], b[column][row], b[column + 1][row]);
    widen_pair(given.b[1], b[column + 8][row], b[column + 9][row]);
    c[row][column] = given.c[0], c[row][column + 1] = given.c[1];
    c[row + 8][column] = given.c[2], c[row + 8][column + 1] = given.c[3];
  }
  const auto half_of = [](const double (&matrix)[16][8], int row, int column) {
    Half out;
    std::memcpy(&out, &matrix[row][column], sizeof out);
    return out;
  };
  for (int row = 0; row < 16; ++row) {
    Half left = half_of(c, row, 0), right = half_of(c, row, 4);
    for (int k = 0; k < 16; ++k) left += a[row][k] * half_of(b, k, 0), right += a[row][k] * half_of(b, k, 4);
    std::memcpy(&c[row][0], &left, sizeof left), std::memcpy(&c[row][4], &right, sizeof right);
  }
  for (int i = 0; i < 32; ++i) {
    const double *const above = &c[i / 4][i % 4 * 2], *const below = &c[i / 4 + 8][i % 4 * 2];
    out[i] = {{towards_zero(above[0]), towards_zero(above[1]), towards_zero(below[0]), towards_zero(below[1])}};
  }
}

}  // namespace emulation

template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const emulation::Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  const auto sums = emulation::from_warp<emulation::Sums, emulation::multiply_tile<T>>(mine);
  for (int i = 0; i < 4; ++i) c[i] = sums.c[i];
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
