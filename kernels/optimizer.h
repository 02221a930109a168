// Optimizer steps over a flat shard, in place, one pass over memory.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// What changes, or may change, from step to step: a dense f64 or f32 vector of this many values,
/// in this order. Each is rounded to the parameters' dtype once.
enum AdamWScalar {
  kLearningRate,
  kBeta1,
  kBeta2,
  kEpsilon,
  kWeightDecay,
  kBiasCorrection1,
  kBiasCorrection2,
  kClipScale,
  kAdamWScalars
};

/// One step of AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2),
/// elementwise:
///
///   g  = clip_scale * grad
///   m  = beta1 * m + (1 - beta1) * g
///   v  = beta2 * v + ((1 - beta2) * g) * g
///   p  = p - (learning_rate * weight_decay) * p          where the segment decays
///   p  = p - learning_rate * ((m / bias_correction1) / (sqrt(v / bias_correction2) + epsilon))
///
/// Every operation is rounded by itself, in this order, as the CUDA kernel does. bias_correction =
/// 1 - beta^t. param, m, v: dense [n], f32 or f64; grad: dense [n], any floating type; segments:
/// i64 [k, 3] of (begin, end, decay?), dense. Elements outside all segments (padding) keep their
/// values.
///
/// `clip_scale`, if given, is a floating scalar that takes the place of kClipScale: clipping leaves
/// it where it was computed. `found_inf`, if given, is an i32 scalar: where it is not 0 nothing is
/// done.
void adamw(const View& param, const View& grad, const View& m, const View& v, const View& segments,
           const View& scalars, const View& clip_scale = {}, const View& found_inf = {});

/// For steps that may be skipped, whose count the host does not know: `applied`, i64 [], counts
/// one more unless `found_inf` (View{}: 0) is set; out: `scalars`, f64 [n] with those of AdamW
/// first, but the bias corrections are those of this count.
void count_adamw(const View& scalars, const View& found_inf, const View& applied, const View& out);
/// x^n by squaring: IEEE products only, so that every machine has the same bits.
SHEAF_HOST_DEVICE inline double power(double x, int64_t n) {
  double out = 1.0;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) out *= x;
  return out;
}

enum SgdScalar { kSgdLearningRate, kSgdMomentum, kSgdWeightDecay, kSgdClipScale, kSgdScalars };

/// One step of SGD with momentum (Sutskever et al. 2013, in PyTorch's form without dampening):
///
///   g = clip_scale * grad + weight_decay * p (where the segment decays)
///   b = momentum * b + g;   g = nesterov ? g + momentum * b : b      (only with a buffer)
///   p = p - learning_rate * g
///
/// `momentum_buffer` is View{} for plain SGD; `clip_scale` and `found_inf` as above.
void sgd(const View& param, const View& grad, const View& momentum_buffer, const View& segments,
         const View& scalars, bool nesterov, const View& clip_scale = {},
         const View& found_inf = {});

}  // namespace cpu

/// The same on a GPU, with the same order of scalars: one launch, and the same bits (in f64, where
/// the CPU flushes subnormal numbers, up to those). `segments`, `scalars`, `clip_scale` and
/// `found_inf` lie in device memory, so that a recorded step can be replayed and a gradient norm
/// never visits the host. Segments must be sorted and not overlap: of a table in another order some
/// part is applied. What lies beyond the shard is cut off.
namespace cuda {

void adamw(const Stream& stream, const View& param, const View& grad, const View& m, const View& v,
           const View& segments, const View& scalars, const View& clip_scale = {},
           const View& found_inf = {});
void count_adamw(const Stream& stream, const View& scalars, const View& found_inf,
                 const View& applied, const View& out);
void sgd(const Stream& stream, const View& param, const View& grad, const View& momentum_buffer,
         const View& segments, const View& scalars, bool nesterov, const View& clip_scale = {},
         const View& found_inf = {});

}  // namespace cuda
}  // namespace sheaf::kernels
