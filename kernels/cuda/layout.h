// Strided operands of kernels that move data: dimensions merged on the host, indices computed on the device by multiplications
// instead of divisions, dense runs processed in units of up to 16 bytes.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>

#include "sheaf/core/view.h"
#include "sheaf/kernels/cuda/divider.h"

namespace sheaf::kernels::cuda {

enum class Order : bool {
  memory,    ///< dimensions from operand 0's largest stride to its smallest
  row_major  ///< as given: flat indices count elements in row-major order
};

/// N operands of one shape, dimensions of size 1 dropped and neighbours merged where all operands
/// allow it. At least one dimension.
template <int N>
struct Layout {
  int rank = 0;
  int64_t numel = 1;
  int64_t shape[kMaxDims] = {};
  int64_t strides[N][kMaxDims] = {};
  Divider by[kMaxDims];  // by `shape`, except the first size, by which nothing is divided

  Layout() = default;
  Layout(const Shape& sizes, const std::array<Shape, N>& steps, Order in = Order::memory)
      : numel(sizes.numel()) {
    int order[kMaxDims], n = 0;
    for (int d = 0; d < sizes.rank(); ++d)
      if (sizes[d] != 1) order[n++] = d;
    if (in == Order::memory)
      std::stable_sort(order, order + n, [&](int a, int b) { return steps[0][a] > steps[0][b]; });
    for (int k = 0; k < n; ++k) {
      const int d = order[k];
      bool merges = rank > 0;
      for (int m = 0; m < N && merges; ++m) merges = strides[m][rank - 1] == sizes[d] * steps[m][d];
      if (!merges) shape[rank++] = 1;
      shape[rank - 1] *= sizes[d];
      for (int m = 0; m < N; ++m) strides[m][rank - 1] = steps[m][d];
    }
    if (rank == 0) shape[rank++] = 1;  // of no stride
    set_dividers();
  }

  /// True if runs of `width` elements can be treated as one: operands in the bit set `dense` are dense along the last dimension, the
  /// others are constant there.
  bool folds(int64_t width, unsigned dense) const {
    if (shape[rank - 1] % width != 0) return false;
    for (int m = 0; m < N; ++m) {
      const bool moves = (dense >> m & 1) != 0;
      if (strides[m][rank - 1] != (moves ? 1 : 0)) return false;
      for (int d = 0; d + 1 < rank && moves; ++d)
        if (strides[m][d] % width != 0) return false;
    }
    return true;
  }
  /// The widest unit, a power of two of at most `limit` elements of `size` bytes, to which all
  /// `pointers` are aligned and that folds.
  int64_t unit(int64_t limit, unsigned dense, int64_t size,
               std::initializer_list<const void*> pointers) const {
    int64_t width = limit;
    const auto fits = [&] {
      for (const void* p : pointers)
        if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(width * size) != 0)
          return false;
      return folds(width, dense);
    };
    while (width > 1 && !fits()) width /= 2;
    return width;
  }
  /// Counts the last dimension, and the strides of `dense` operands, in units of `width`.
  void fold(int64_t width, unsigned dense) {
    if (width == 1) return;
    shape[rank - 1] /= width, numel /= width;
    for (int m = 0; m < N; ++m)
      for (int d = 0; d + 1 < rank && (dense >> m & 1) != 0; ++d) strides[m][d] /= width;
    set_dividers();
  }
  /// True if the operand is one dense run.
  bool is_run(int operand) const {
    return rank == 1 && (shape[0] <= 1 || strides[operand][0] == 1);
  }
  /// For a single run: truncates it to whole units and returns the number of elements left over.
  int64_t cut_tail(int64_t width) {
    const int64_t tail = shape[0] % width;
    shape[0] -= tail, numel -= tail;
    return tail;
  }
  /// Removes dimension d.
  void remove(int d) {
    numel /= shape[d];
    --rank;
    for (int k = d; k < rank; ++k) {
      shape[k] = shape[k + 1];
      for (int m = 0; m < N; ++m) strides[m][k] = strides[m][k + 1];
    }
    if (rank == 0) shape[rank++] = 1;
    set_dividers();
  }
  View view(int operand, void* data, DType dtype) const {
    const auto size = static_cast<size_t>(rank);
    return {data, dtype, Shape(std::span(shape, size)), Shape(std::span(strides[operand], size))};
  }

  /// The offsets of all operands at flat index i.
  __device__ void offsets(int64_t i, int64_t (&out)[N]) const {
    for (int m = 0; m < N; ++m) out[m] = 0;
    if (numel <= INT32_MAX) {
      unsigned rest = static_cast<unsigned>(i);
      for (int d = rank - 1; d > 0; --d) {
        const unsigned q = by[d].short_quotient(rest);
        const int64_t at = rest - q * static_cast<unsigned>(shape[d]);
        for (int m = 0; m < N; ++m) out[m] += at * strides[m][d];
        rest = q;
      }
      i = rest;
    } else {
      for (int d = rank - 1; d > 0; --d) {
        const int64_t q = by[d].quotient(i), at = i - q * shape[d];
        for (int m = 0; m < N; ++m) out[m] += at * strides[m][d];
        i = q;
      }
    }
    for (int m = 0; m < N; ++m) out[m] += i * strides[m][0];
  }
  /// The offset of one operand, for kernels that ask for few: less code.
  __device__ int64_t offset(int operand, int64_t i) const {
    int64_t out = 0;
    for (int d = rank - 1; d > 0; --d) {
      const int64_t q = by[d].quotient(i);
      out += (i - q * shape[d]) * strides[operand][d];
      i = q;
    }
    return out + i * strides[operand][0];
  }

 private:
  void set_dividers() {
    for (int d = 1; d < rank; ++d) by[d] = Divider(std::max<int64_t>(shape[d], 1));
  }
};

/// f.operator()<U>() for a type of `bytes` bytes that is read and written in one access.
template <class F>
void visit_unit(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    case 8:
      return f.template operator()<uint2>();
    default:
      return f.template operator()<uint4>();
  }
}

}  // namespace sheaf::kernels::cuda
