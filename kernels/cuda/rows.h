// Kernels over rows: the place of a row for any strides before the last dimension, its pieces of 16 bytes, and sums
// and maxima over a warp or a block.
#pragma once

#include <algorithm>

#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda {

/// The rows of a view: all dimensions but the last, in row-major order, whatever their strides. The
/// last dimension is dense. T is the storage type.
template <class T>
struct Rows {
  T* data;
  int64_t count, cols;
  Layout<1> at;

  __device__ T* operator[](int64_t row) const { return data + at.offset(0, row); }
};

template <class T>
Rows<T> rows_of(const char* who, const View& v) {
  check<ShapeError>(v.rank() >= 1 && (v.strides.back() == 1 || v.shape.back() <= 1 || !v.numel()),
                    '[', who, "] the last dimension must be dense, strides are ", v.strides);
  Shape heads = v.shape, strides = v.strides;
  heads.erase(v.rank() - 1), strides.erase(v.rank() - 1);
  const Layout<1> at(heads, {strides}, Order::row_major);
  return {v.as<T>(), at.numel, v.shape.back(), at};
}

/// The elements of a view, as rows of one element.
template <class T>
Rows<T> elements_of(const char* who, View v) {
  check<ShapeError>(v.rank() < kMaxDims, '[', who, "] more than 7 dimensions: ", v.shape);
  v.shape.push_back(1), v.strides.push_back(1);
  return rows_of<T>(who, v);
}

/// The elements of a view of any dtype, read as i64.
struct Indices {
  Rows<const char> bytes;
  DType dtype;
  __device__ int64_t operator[](int64_t i) const { return load_any<int64_t>(dtype, bytes[i], 0); }
};
inline Indices indices_of(const char* who, View v) {
  const auto size =
      static_cast<int64_t>(visit_index(who, v.dtype, [&]<class I>() { return sizeof(I); }));
  for (int i = 0; i < v.rank(); ++i) v.strides[i] *= size;
  return {elements_of<const char>(who, v), v.dtype};
}

/// Elements [at, at + Pack<T>::kSize) of a row of n; zeros past its end.
template <class T>
__device__ inline Pack<T> load_chunk(const T* row, int64_t at, int64_t n) {
  constexpr int kSize = Pack<T>::kSize;
  const T* from = row + at;
  if (at + kSize <= n && reinterpret_cast<uintptr_t>(from) % 16 == 0) return load_pack(from);
  Pack<T> out;
#pragma unroll
  for (int k = 0; k < kSize; ++k) out.v[k] = at + k < n ? from[k] : T{};
  return out;
}

/// Like load_chunk, but whole pieces are never handled as elements, which would take a register each.
template <class T>
__device__ inline uint4 load_raw(const T* row, int64_t at, int64_t n) {
  if (at + Pack<T>::kSize <= n && reinterpret_cast<uintptr_t>(row + at) % 16 == 0)
    return *reinterpret_cast<const uint4*>(row + at);
  return pressed(load_chunk(row, at, n));
}
/// The same for rows that may begin anywhere: inside the row, the two aligned pieces around the required one are read and shifted.
template <class T>
__device__ inline uint4 load_raw_shifted(const T* row, int64_t at, int64_t n) {
  constexpr int kSize = Pack<T>::kSize;
  const auto past = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row + at) % 16);
  const T* from = row + at - past / sizeof(T);
  if (past == 0 || from < row || from + 2 * kSize > row + n) return load_raw(row, at, n);
  const uint4 low = *reinterpret_cast<const uint4*>(from),
              high = *reinterpret_cast<const uint4*>(from + kSize);
  unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (past & 8)
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  if (past & 4)
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  if (past & 2)
    for (int i = 0; i < 4; ++i) w[i] = w[i] >> 16 | w[i + 1] << 16;
  return {w[0], w[1], w[2], w[3]};
}
template <class T>
__device__ inline Pack<T> load_shifted_chunk(const T* row, int64_t at, int64_t n) {
  return unpressed<T>(load_raw_shifted(row, at, n));
}

template <class T>
__device__ inline T element_of(const uint4& raw, int k) {
  return unpressed<T>(raw).v[k];
}

/// Stores the part of the pack that is before the row's end.
template <class T>
__device__ inline void store_chunk(T* row, int64_t at, int64_t n, const Pack<T>& pack) {
  constexpr int kSize = Pack<T>::kSize;
  T* to = row + at;
  if (at + kSize <= n && reinterpret_cast<uintptr_t>(to) % 16 == 0) return store_global_pack(to, pack);
#pragma unroll
  for (int k = 0; k < kSize; ++k)
    if (at + k < n) to[k] = pack.v[k];
}

/// Threads of a block in which each processes one of `items`, at most `most`: whole warps.
inline int threads_for(int64_t items, int most) {
  return static_cast<int>(std::clamp<int64_t>(blocks_for(items, kWarp), 1, most / kWarp)) * kWarp;
}

/// The result in all lanes, with the same bits.
template <class C>
__device__ inline C warp_sum(C x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}
template <class C>
__device__ inline C warp_max(C x) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const C other = __shfl_xor_sync(kFullWarp, x, step);
    x = other > x ? other : x;
  }
  return x;
}

/// in_warp's results over the warps of the block, combined in their order, to all threads.
/// `scratch`: a value for each warp in shared memory, which must not be used again before the
/// block's next barrier.
template <class C, class InWarp, class Combine>
__device__ inline C over_warps(C x, C* scratch, InWarp in_warp, Combine combine) {
  x = in_warp(x);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (warps == 1) return x;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = scratch[0];
  for (int w = 1; w < warps; ++w) x = combine(x, scratch[w]);
  return x;
}
template <class C>
__device__ inline C block_sum(C x, C* scratch) {
  return over_warps(
      x, scratch, [](C y) { return warp_sum(y); }, [](C a, C b) { return a + b; });
}
template <class C>
__device__ inline C block_max(C x, C* scratch) {
  return over_warps(
      x, scratch, [](C y) { return warp_max(y); }, [](C a, C b) { return b > a ? b : a; });
}

}  // namespace sheaf::kernels::cuda
