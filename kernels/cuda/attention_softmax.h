// A row of attention is computed from its scores and values in one order, which our kernels share so that they give the same bits:
// keys are processed kSegment at a time, from the first of the row's document; those of a segment a tile at a time, against the
// largest score so far (online softmax); then segments are combined in order. Keys that the row does not see change nothing, and
// neither does skipping a tile or a segment of only such keys. Kernels differ in which block computes what: a block of
// attention_blocked.cu computes a whole row, one of attention_decode.cu a segment. Tensor-core kernels have a different order within
// a tile, and different exponentials.
#pragma once

#include <limits>

#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda::attention_tiles {

/// Threads that share a row's scores in kernels without tensor cores; neighbours in a warp: thread n has keys n, n
/// + 16, ... of a tile.
inline constexpr int kSide = 16;

/// Keys of a segment, a multiple of every tile. With fewer, more blocks share a short context, but more is written and reread: the
/// f32 sums of a segment are 1/256 of its keys and values of 16 bits if a key head has one row, and 1/16 if it has 16.
inline constexpr int kSegment = 256;

template <class C>
inline constexpr C kHidden = -std::numeric_limits<C>::infinity();

template <class C>
__device__ inline C exponential(C x) {
  if constexpr (std::is_same_v<C, float>)
    return expf(x);
  else
    return ::exp(x);
}

/// For some keys: the largest score, and the sum of all exp(score - largest).
template <class C>
struct Softmax {
  C most = kHidden<C>, total = C(0);
};

/// Turns a thread's scores of the next tile, kHidden for keys that the row does not see, into weights. Returns the factor of the
/// row's sums before these are added. `total` is only the thread's part until close_segment.
template <int kScores, class C>
__device__ inline C add_tile(Softmax<C>& row, C (&scores)[kScores]) {
  C largest = row.most;
#pragma unroll
  for (int j = 0; j < kScores; ++j) largest = scores[j] > largest ? scores[j] : largest;
  for (int step = kSide / 2; step > 0; step /= 2) {  // over the threads of the row
    const C other = __shfl_xor_sync(kFullWarp, largest, step);
    largest = other > largest ? other : largest;
  }
  const C base = largest == kHidden<C> ? C(0) : largest, shrink = exponential(row.most - base);
  row.most = largest, row.total = rounded_product(row.total, shrink);
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    scores[j] = exponential(scores[j] - base);
    row.total += scores[j];
  }
  return shrink;
}

/// kSharers neighbouring threads share the row.
template <int kSharers, class C>
__device__ inline void close_segment(Softmax<C>& row) {
  for (int step = kSharers / 2; step > 0; step /= 2)
    row.total += __shfl_xor_sync(kFullWarp, row.total, step);
}

/// The factors for the sums of the keys before a segment, and for the segment's own, with which they are added.
template <class C>
struct Shares {
  C before, segment;
  __device__ C sum(C of_before, C of_segment) const {
    return fused_sum(of_before, before, rounded_product(of_segment, segment));
  }
};

/// Computes them from the largest scores of both.
template <class C>
__device__ inline Shares<C> shares_of(C before, C segment) {
  const C larger = segment > before ? segment : before, base = larger == kHidden<C> ? C(0) : larger;
  return {exponential(before - base), exponential(segment - base)};
}

template <class C>
__device__ inline Shares<C> add_segment(Softmax<C>& row, const Softmax<C>& segment) {
  const Shares<C> shares = shares_of(row.most, segment.most);
  row.most = segment.most > row.most ? segment.most : row.most;
  row.total = shares.sum(row.total, segment.total);
  return shares;
}

/// The final factor of a row's sums, and its lse. For a row that sees no key, 0 and -inf.
template <class C>
struct Ending {
  C scale, lse;
};
template <class C>
__device__ inline Ending<C> ending_of(const Softmax<C>& row) {
  const bool sees = !(row.total == C(0));  // true for NaN
  const C log_total = std::is_same_v<C, float> ? C(logf(row.total)) : C(::log(row.total));
  return {sees ? C(1) / row.total : C(0), sees ? row.most + log_total : kHidden<C>};
}

}  // namespace sheaf::kernels::cuda::attention_tiles
