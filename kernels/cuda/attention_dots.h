// The values that each query's gradients need in addition to its operands: the first step of attention's backward kernels.
#pragma once

#include "sheaf/kernels/cuda/attention_rows.h"
#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda::attention_tiles {

/// lse and dot of a query.
template <class C>
struct Statistics {
  PerQuery<const C> lse;
  const C* dot;  ///< dout·out, [B, H, T], dense
};

constexpr int kRowsABlock = 8;

/// One warp per query.
template <class T>
__global__ void __launch_bounds__(kRowsABlock* kWarp)
    output_dots(Problem p, Heads out, Heads dout, Compute<T>* dots) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / kWarp;
  if (row >= p.batch * p.heads * p.queries) return;
  const int64_t t = row % p.queries, h = row / p.queries % p.heads, b = row / p.queries / p.heads;
  const T* x = static_cast<const T*>(out.data) + out.offset(b, t, h);
  const T* y = static_cast<const T*>(dout.data) + dout.offset(b, t, h);
  C sum = C(0);
  for (int at = static_cast<int>(threadIdx.x) % kWarp * kSize; at < out.width; at += kWarp * kSize) {
    const uint4 raw_x = load_raw(x, at, out.width), raw_y = load_raw(y, at, out.width);
    const Pack<T> px = unpressed<T>(raw_x), py = unpressed<T>(raw_y);
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum += convert_to<C>(px.v[k]) * convert_to<C>(py.v[k]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) dots[row] = sum;
}

/// Computes dot of all queries, to `dots`. T is the elements' type.
template <class T>
Statistics<Compute<T>> statistics_of(const char* who, const Stream& stream, const Problem& p, const View& out, const View& lse,
                                     const View& dout, Compute<T>* dots) {
  launch(who, stream, {.blocks = blocks_for(p.batch * p.heads * p.queries, kRowsABlock), .threads = kRowsABlock * kWarp}, output_dots<T>, p,
         Heads(out), Heads(dout), dots);
  return {PerQuery<const Compute<T>>(lse), dots};
}

}  // namespace sheaf::kernels::cuda::attention_tiles
