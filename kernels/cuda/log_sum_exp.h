// The log-sum-exp of a row in one pass, shared by all kernels that need it: with the same order of operations, so that the bits do
// not depend on the kernel.
#pragma once

#include <limits>

#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda {

inline constexpr int kLogSumExpBatch = 4;      // pieces of 16 bytes that a thread takes at a time
inline constexpr int kLogSumExpThreads = 512;  // of a block at most

/// Threads of the block that processes a row of n elements of T.
template <class T>
int log_sum_exp_threads(int64_t n) {
  return threads_for(blocks_for(n, Pack<T>::kSize * kLogSumExpBatch), kLogSumExpThreads);
}

/// exp of arguments up to about 0. With narrow logits a more accurate one would not matter.
template <class T>
__device__ Compute<T> exponential(Compute<T> x) {
  if constexpr (kIsNarrow<T>)
    return __expf(x);
  else if constexpr (std::is_same_v<T, float>)
    return expf(x);
  else
    return ::exp(x);
}

/// The value to subtract before exponentials: the largest, or 0 if all are -inf.
template <class C>
__device__ C base_of(C most) {
  return most == -std::numeric_limits<C>::infinity() ? C(0) : most;
}

/// A thread's elements of a row so far: the largest, and the sum of exponentials relative to it, rescaled for each
/// new largest one.
template <class T>
class LogSumExp {
 public:
  using C = Compute<T>;
  C most = -std::numeric_limits<C>::infinity(), sum = C(0);

  /// Adds packs that are `step` columns apart; the row ends `left` columns after the first one's beginning, and elements past that
  /// are ignored.
  __device__ void add(const Pack<T> (&packs)[kLogSumExpBatch], int step, int left) {
    const bool whole = (kLogSumExpBatch - 1) * step + Pack<T>::kSize <= left;
    if (whole)
      take(packs, [](int, int) { return true; });
    else
      take(packs, [&](int u, int k) { return u * step + k < left; });
  }
  /// Adds this thread's packs of a row of n elements; load(at) returns the one at column `at`, as words: narrow elements would be
  /// waited for, to be taken apart.
  template <class Load>
  __device__ void add_row(int64_t n, Load load) {
    constexpr int kSize = Pack<T>::kSize;
    const int step = static_cast<int>(blockDim.x) * kSize;
    for (int64_t first = threadIdx.x * kSize; first < n; first += kLogSumExpBatch * step) {
      uint4 raw[kLogSumExpBatch];
#pragma unroll
      for (int u = 0; u < kLogSumExpBatch; ++u)
        if (first + u * step < n) raw[u] = load(first + u * step);
      Pack<T> packs[kLogSumExpBatch];
#pragma unroll
      for (int u = 0; u < kLogSumExpBatch; ++u) packs[u] = unpressed<T>(raw[u]);
      add(packs, step, static_cast<int>(std::min<int64_t>(n - first, INT32_MAX)));
    }
  }
  /// The row's log-sum-exp, in all threads of the block. `scratch` as for block_sum.
  __device__ C over_block(C (&scratch)[2][kWarp]) const {
    const C base = base_of(block_max(most, scratch[0]));
    const C total = block_sum(rounded_product(sum, exponential<T>(most - base)), scratch[1]);
    return base + (std::is_same_v<C, float> ? C(logf(total)) : C(::log(total)));
  }

 private:
  template <class Counts>
  __device__ void take(const Pack<T> (&packs)[kLogSumExpBatch], Counts counts) {
    constexpr int kSize = Pack<T>::kSize;
    const C before = most;
#pragma unroll
    for (int u = 0; u < kLogSumExpBatch; ++u)
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        if (counts(u, k)) most = larger(convert_to<C>(packs[u].v[k]), most);
    const C base = base_of(most);
    sum = rounded_product(sum, exponential<T>(before - base));
#pragma unroll
    for (int u = 0; u < kLogSumExpBatch; ++u)
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        if (counts(u, k))
          sum += exponential<T>(convert_to<C>(packs[u].v[k]) - base);  // NaN if the logit is
  }
  /// `b` if a is NaN.
  __device__ static float larger(float a, float b) { return fmaxf(a, b); }
  __device__ static double larger(double a, double b) { return a > b ? a : b; }
};

}  // namespace sheaf::kernels::cuda
