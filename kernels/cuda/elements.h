// Elementwise kernels over any strides and element types: map_elements(name, stream, f, outputs,
// inputs) calls f(in, out) for each element, in the compute type of all operands together. Dense operands of one
// floating dtype, with any common order of dimensions, are read and written 16 bytes at a time, and so are
// broadcast ones for functors that ask for it; everything else is processed element by element, in the order of the
// first output.
#pragma once

#include <array>

#include "sheaf/kernels/cuda/few_blocks.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda {

/// The operands of an elementwise kernel, outputs first, and where their elements are.
template <int N>
struct Walk : Layout<N> {
  void* data[N];
  DType dtype[N];

  bool dense() const {
    for (int n = 0; n < N; ++n)
      if (!this->is_run(n)) return false;
    return true;
  }
};

template <int N>
Walk<N> walk_of(const char* name, const std::array<View, N>& views, Order order) {
  std::array<Shape, N> strides;
  for (int n = 0; n < N; ++n) {
    check<ShapeError>(views[n].shape == views[0].shape, '[', name, "] kernel operands have shapes ",
                      views[0].shape, " and ", views[n].shape);
    strides[n] = views[n].strides;
  }
  Walk<N> w{Layout<N>(views[0].shape, strides, order), {}, {}};
  for (int n = 0; n < N; ++n) w.data[n] = views[n].data, w.dtype[n] = views[n].dtype;
  return w;
}

/// The compute type of several operands together: f64 if any is f64, else f32 if any is floating,
/// else i64.
inline DType compute_type_of(std::initializer_list<View> views) {
  DType out = kI64;
  for (const View& v : views)
    if (v.dtype == kF64)
      out = kF64;
    else if (is_floating(v.dtype) && out == kI64)
      out = kF32;
  return out;
}

namespace detail {

/// g(f), or g(the functor that f selects) if the function depends on more than f's type.
template <class C, class F, class G>
__device__ void choose(const F& f, G g) {
  if constexpr (requires { f.template choose<C>(g); })
    f.template choose<C>(g);
  else
    g(f);
}

template <class T, int M, int N, class F>
__global__ void map_packs(F f, Walk<M + N> w) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t round = static_cast<int64_t>(gridDim.x) * blockDim.x * kSize;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kSize;
  for (; at < w.numel; at += round) {
    const int count = w.numel - at < kSize ? static_cast<int>(w.numel - at) : kSize;
    uint4 raw[N > 0 ? N : 1];
    for (int n = 0; n < N; ++n) {
      const T* from = static_cast<const T*>(w.data[M + n]) + at;
      if (count == kSize) {
        raw[n] = *reinterpret_cast<const uint4*>(from);
      } else {
        Pack<T> part;
#pragma unroll
        for (int k = 0; k < kSize; ++k)  // not to `count`: run-time indices mean local memory
          part.v[k] = k < count ? from[k] : T{};
        raw[n] = pressed(part);
      }
    }
    Pack<T> in[N > 0 ? N : 1], out[M];
    for (int n = 0; n < N; ++n) in[n] = unpressed<T>(raw[n]);
    choose<C>(f, [&](const auto& one) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {  // also what is not there: a branch for each costs more
        C x[N > 0 ? N : 1], y[M];
        for (int n = 0; n < N; ++n) x[n] = convert_to<C>(in[n].v[k]);
        one(x, y);
        for (int m = 0; m < M; ++m) out[m].v[k] = element<T>(y[m]);
      }
    });
    for (int m = 0; m < M; ++m) {
      T* to = static_cast<T*>(w.data[m]) + at;
      if (count == kSize)
        store_pack(to, out[m]);
      else
#pragma unroll
        for (int k = 0; k < kSize; ++k)
          if (k < count) to[k] = out[m].v[k];
    }
  }
}

/// Processes packs of T. Operands whose bit in `wide` is not set have one element, of any dtype, for a whole pack.
template <class T, int M, int N, class F>
__global__ void map_broadcast(F f, Walk<M + N> w, unsigned wide) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= w.numel) return;
  int64_t at[M + N];
  w.offsets(i, at);
  uint4 raw[N];  // of wide operands
  C single[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const void* const from = w.data[M + n];
    if (wide >> (M + n) & 1)
      raw[n] = *reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at[M + n] * kSize);
    else
      single[n] = load_any<C>(w.dtype[M + n], from, at[M + n]);
  }
  C x[N][kSize];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const Pack<T> pack = unpressed<T>(raw[n]);
#pragma unroll
    for (int k = 0; k < kSize; ++k) x[n][k] = wide >> (M + n) & 1 ? convert_to<C>(pack.v[k]) : single[n];
  }
  Pack<T> out[M];
  choose<C>(f, [&](const auto& one) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      C in[N], y[M];
#pragma unroll
      for (int n = 0; n < N; ++n) in[n] = x[n][k];
      one(in, y);
      for (int m = 0; m < M; ++m) out[m].v[k] = element<T>(y[m]);
    }
  });
  for (int m = 0; m < M; ++m) store_pack(static_cast<T*>(w.data[m]) + at[m] * kSize, out[m]);
}

template <class C, int M, int N, class F>
__global__ void map_strided(F f, Walk<M + N> w) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < w.numel;
       i += step) {
    int64_t at[M + N];
    w.offsets(i, at);
    C x[N > 0 ? N : 1], y[M] = {};
    for (int n = 0; n < N; ++n) x[n] = load_any<C>(w.dtype[M + n], w.data[M + n], at[M + n]);
    choose<C>(f, [&](const auto& one) { one(x, y); });
    for (int m = 0; m < M; ++m) store_any<C>(w.dtype[m], w.data[m], at[m], y[m]);
  }
}

/// Runs map_broadcast and returns true if it supports the operands: outputs of T, inputs of T or constant along the last dimension.
template <class T, int M, int N, class F>
bool map_by_broadcast(const char* name, const Stream& stream, const F& f, Walk<M + N> w,
                      int threads) {
  constexpr int kSize = Pack<T>::kSize;
  unsigned wide = 0;
  for (int n = 0; n < M + N; ++n)
    if (w.strides[n][w.rank - 1] == 1) wide |= 1u << n;
  if ((wide & ((1u << M) - 1)) != (1u << M) - 1 || !w.folds(kSize, wide)) return false;
  for (int n = 0; n < M + N; ++n)
    if ((wide >> n & 1) && (w.dtype[n] != w.dtype[0] || !aligned16(w.data[n]))) return false;
  w.fold(kSize, wide);
  launch(name, stream, {.blocks = blocks_for(w.numel, threads), .threads = threads},
         map_broadcast<T, M, N, F>, f, w, wide);
  return true;
}

}  // namespace detail

/// f: a functor with `template <class C> __device__ void operator()(const C* in, C* out) const`, or
/// with `template <class C, class G> __device__ void choose(G g) const`, which calls g(such a functor) once for all
/// elements of a thread; with `static constexpr bool kBroadcasts = true` if it often meets operands that are
/// broadcast. Operands compute in `compute` (f64, f32 or i64). An output may be the same memory as an input,
/// element for element.
template <int M, int N, class F>
void map_elements(const char* name, const Stream& stream, DType compute, F f,
                  const std::array<View, M>& outputs, const std::array<View, N>& inputs) {
  std::array<View, M + N> all;
  for (int m = 0; m < M; ++m) all[m] = outputs[m];
  for (int n = 0; n < N; ++n) all[M + n] = inputs[n];
  const Walk<M + N> w = walk_of<M + N>(name, all, Order::memory);
  if (w.numel == 0) return;
  bool packs = w.dense() && is_floating(w.dtype[0]);
  for (int n = 0; n < M + N; ++n) packs = packs && w.dtype[n] == w.dtype[0] && aligned16(w.data[n]);
  constexpr int kThreads = 256;
  if (packs) {
    visit_floating(name, w.dtype[0], [&]<class T>() {
      launch(name, stream,
             {.blocks = FewBlocks::of(blocks_for(w.numel, kThreads * Pack<T>::kSize)), .threads = kThreads},
             detail::map_packs<T, M, N, F>, f, w);
    });
    return;
  }
  if constexpr (requires { typename F::Broadcasts; }) {
    bool done = false;
    if (is_floating(w.dtype[0]) && compute == (w.dtype[0] == kF64 ? kF64 : kF32))
      visit_floating(name, w.dtype[0], [&]<class T>() {
        done = detail::map_by_broadcast<T, M, N>(name, stream, f, w, kThreads);
      });
    if (done) return;
  }
  const LaunchShape shape{.blocks = std::min<int64_t>(blocks_for(w.numel, kThreads), 1 << 20),
                          .threads = kThreads};
  if (compute == kF64)
    launch(name, stream, shape, detail::map_strided<double, M, N, F>, f, w);
  else if (compute == kF32)
    launch(name, stream, shape, detail::map_strided<float, M, N, F>, f, w);
  else
    launch(name, stream, shape, detail::map_strided<int64_t, M, N, F>, f, w);
}

}  // namespace sheaf::kernels::cuda
