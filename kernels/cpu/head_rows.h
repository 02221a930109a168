// Rows of one head, packed: in the compute type, in whole lanes, as small products (tile_gemm.h) need them.
#pragma once

#include <algorithm>

#include "sheaf/core/view.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/transpose.h"

namespace sheaf::kernels::cpu {

/// Width of a row that is packed into whole lanes.
inline int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

/// One head of a [B, T, H, width] view, from row `begin` on: rows with one stride.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride, width;
  HeadRows(const View& v, int64_t b, int64_t begin, int64_t h)
      : data(v.as<T>() + b * v.strides[0] + begin * v.strides[1] + h * v.strides[2]), stride(v.strides[1]), width(v.shape[3]) {}
  T* operator[](int64_t t) const { return data + t * stride; }
};

/// to[count, padded(width)] = rows * factor, zeros past the rows' width and past `available` rows.
template <class T, class C>
void pack(HeadRows<const T> from, int64_t first, int64_t available, int64_t count, C factor, C* to) {
  const int64_t columns = padded(from.width);
  const Lanes<C> scale(factor);
  for (int64_t r = 0; r < count; ++r, to += columns) {
    if (r >= available) {
      std::fill_n(to, columns, C(0));
      continue;
    }
    const T* row = from[first + r];
    for_lanes(from.width, [&](int64_t i, auto n) { (load_lanes(row + i, n) * scale).store(to + i); });
  }
}

/// Rows from `first` on = from[count, padded(width)] * factor.
template <class T, class C>
void unpack(const C* from, C factor, HeadRows<T> to, int64_t first, int64_t count) {
  const int64_t columns = padded(to.width);
  // Adding +0 gives every zero one sign, whether or not a -0 was added on the way.
  const Lanes<C> scale(factor), zero(C(0));
  for (int64_t r = 0; r < count; ++r, from += columns)
    for_lanes(to.width, [&](int64_t i, auto n) { store_lanes(to[first + r] + i, Lanes<C>::load(from + i) * scale + zero, n); });
}

/// to[columns, rows] = the transpose of from[rows, columns], both multiples of kLanes.
template <class C>
void transpose(const C* from, int64_t rows, int64_t columns, C* to) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) transpose_16x16(from + r * columns + c, columns, to + c * rows + r, rows);
}

}  // namespace sheaf::kernels::cpu
