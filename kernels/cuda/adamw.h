// The AdamW update of a flat fp32 shard on a GPU.
#pragma once

#include <cstdint>

// What cudaStream_t points to; naming it here keeps CUDA's headers out of this one.
struct CUstream_st;

namespace sheaf::kernels::cuda {

/// What changes from step to step. It lies in device memory, so that a recorded step can be
/// replayed without its arguments changing, and a gradient norm never visits the host.
struct AdamWScalars {
  float learning_rate;
  float clip_scale;        ///< multiplies every gradient; 1 without clipping
  float bias_correction1;  ///< 1 - beta1^t, t = 1 for the first step
  float bias_correction2;  ///< 1 - beta2^t
};

/// What stays the same over a run.
struct AdamWConstants {
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
};

/// A run of the shard that shares one weight decay: from `begin` to the next segment's begin (or to
/// n).
struct AdamWSegment {
  int64_t begin;  ///< element index, a multiple of 4
  float weight_decay;
};

/// The arrays of n elements each, in device memory, 16-byte aligned.
struct AdamWShard {
  float* param;    ///< updated
  float* moment1;  ///< updated
  float* moment2;  ///< updated
  const float* grad;
  int64_t n;
};

/// One step of AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2),
/// elementwise:
///
///   g  = clip_scale * grad
///   m  = beta1 * m + (1 - beta1) * g
///   v  = beta2 * v + ((1 - beta2) * g) * g
///   p  = p - (learning_rate * weight_decay) * p
///   p  = p - learning_rate * ((m / bias_correction1) / (sqrt(v / bias_correction2) + epsilon))
///
/// Every operation is rounded by itself in fp32, in this order, so a CPU loop without contraction
/// gives the same bits. `segments` and `scalars` are device pointers; segments are sorted by begin,
/// the first begins at 0, there is at least one. One launch on `stream`; returns before it ran.
/// Throws CudaError if the launch fails, ConfigError for misaligned arrays or an empty segment
/// table.
void adamw(CUstream_st* stream, const AdamWShard& shard, const AdamWSegment* segments,
           int64_t num_segments, const AdamWScalars* scalars, const AdamWConstants& constants = {});

}  // namespace sheaf::kernels::cuda
