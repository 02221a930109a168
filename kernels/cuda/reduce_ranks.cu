#include "sheaf/kernels/reduce_ranks.h"

#include <type_traits>

#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda {
namespace {

struct Sources {
  const void* data[kMostSources];
  int count;
};

// The type in which T is combined: narrow floats in f32; summed integers wrap as unsigned ones, compared ones keep
// their sign.
template <class T, bool kSum>
struct Accumulator {
  using type = T;
};
template <bool kSum>
struct Accumulator<bf16, kSum> {
  using type = float;
};
template <bool kSum>
struct Accumulator<f16, kSum> {
  using type = float;
};
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, true> {
  using type = std::make_unsigned_t<T>;
};

template <Reduction R, class A>
__device__ A combine(A a, A b) {
  if constexpr (R == Reduction::sum) return static_cast<A>(a + b);
  else if constexpr (R == Reduction::max) return a > b || a != a ? a : b;
  else return a < b || a != a ? a : b;
}

template <class A, class T>
__device__ A read(T x) {
  if constexpr (kIsNarrow<T>) return widen(x);
  else return static_cast<A>(x);
}
template <class T, class A>
__device__ T rounded(A x) {
  if constexpr (kIsNarrow<T>) return narrow<T>(x);
  else return static_cast<T>(x);
}

template <class T, Reduction R>
__global__ void reduce_kernel(T* out, Sources sources, int64_t count, bool packs) {
  using A = typename Accumulator<T, R == Reduction::sum>::type;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kSize;
  if (at >= count) return;
  const int n = count - at < kSize ? static_cast<int>(count - at) : kSize;
  const bool whole = packs && n == kSize;
  A sum[kSize];
  for (int s = 0; s < sources.count; ++s) {
    const T* from = static_cast<const T*>(sources.data[s]) + at;
    Pack<T> x;
    if (whole) x = load_pack(from);
    else
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        if (k < n) x.v[k] = from[k];
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      if (k < n) sum[k] = s == 0 ? read<A>(x.v[k]) : combine<R>(sum[k], read<A>(x.v[k]));
  }
  Pack<T> y;
#pragma unroll
  for (int k = 0; k < kSize; ++k)
    if (k < n) y.v[k] = rounded<T>(sum[k]);
  if (whole) store_pack(out + at, y);
  else
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      if (k < n) out[at + k] = y.v[k];
}

}  // namespace

void reduce_in_order(const Stream& stream, void* out, std::span<const void* const> sources, int64_t count, DType dtype,
                     Reduction reduction) {
  check<CommError>(sources.size() <= kMostSources, "[reduce_in_order] ", static_cast<int64_t>(sources.size()),
                   " ranks on one GPU; at most ", kMostSources);
  if (count == 0 || sources.empty()) return;
  if (dtype == DType::boolean) {  // as bytes of 0 and 1: or is max, and is min
    dtype = DType::u8;
    if (reduction == Reduction::sum) reduction = Reduction::max;
  }
  Sources all{};
  bool packs = aligned16(out);
  for (const void* s : sources) all.data[all.count++] = s, packs = packs && aligned16(s);
  visit_dtype("reduce_in_order", dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) {
      constexpr int kThreads = 256;
      const LaunchShape shape{.blocks = blocks_for(count, kThreads * Pack<T>::kSize), .threads = kThreads};
      T* y = static_cast<T*>(out);
      switch (reduction) {
        case Reduction::sum: return launch("reduce_in_order", stream, shape, reduce_kernel<T, Reduction::sum>, y, all, count, packs);
        case Reduction::max: return launch("reduce_in_order", stream, shape, reduce_kernel<T, Reduction::max>, y, all, count, packs);
        case Reduction::min: return launch("reduce_in_order", stream, shape, reduce_kernel<T, Reduction::min>, y, all, count, packs);
      }
    }
  });
}

}  // namespace sheaf::kernels::cuda
