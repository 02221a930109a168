// Optimizer steps over a flat shard, in place, one pass over memory.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

// [Note: rounding by chance] State stored in bf16 is rounded to the bf16 below or above with the probabilities that make its mean
// exact (stochastic rounding: Gupta et al. 2015, https://arxiv.org/abs/1502.02551). Rounded to nearest it would not change: a second
// moment changes by a 1000th in a step, less than half the distance between two neighbours. The noise is a hash of the element's
// current parameter, first state and clipped gradient, and of the step: it does not depend on where the element is or which rank
// holds it, so any sharding of a model, number of threads, instruction set and device draws the same bits.

SHEAF_HOST_DEVICE inline uint32_t noise_mix(uint32_t x) {  // Wellons' lowbias32
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
SHEAF_HOST_DEVICE inline uint32_t noise_key(float step) {
  return noise_mix(static_cast<uint32_t>(step) + 0x9e3779b9u);
}
/// 32 random bits of an element: the first state uses the lower half, the second the upper one. `param`, `state`
/// (the first) and `grad` (clipped) are bits of f32, before the step; `key` is the step's noise_key.
SHEAF_HOST_DEVICE inline uint32_t noise_of(uint32_t param, uint32_t state, uint32_t grad,
                                           uint32_t key) {
  return noise_mix(((param ^ key) + grad) ^ state);
}
/// bits of an f32 -> bits of a bf16, by the lower 16 bits of `noise`; infinities and NaN are unchanged.
SHEAF_HOST_DEVICE inline uint16_t rounded_by_chance(uint32_t bits, uint32_t noise) {
  if ((bits & 0x7f800000u) == 0x7f800000u)
    return static_cast<uint16_t>(bits >> 16 | ((bits & 0x7fffffu) != 0 ? 0x40u : 0u));
  return static_cast<uint16_t>((bits + (noise & 0xffffu)) >> 16);
}

/// A row of a table of segments: elements [begin, end) of a shard (exact as f64), and the factors of learning rate
/// and weight decay there.
struct Segment {
  double begin = 0, end = 0, lr = 1, weight_decay = 0;
  static constexpr int64_t kColumns = 4;
};

namespace cpu {

/// Values that change, or may change, from step to step: a dense f64 or f32 vector, in this order. Each is rounded to the parameters'
/// dtype once.
enum AdamWScalar {
  kLearningRate,
  kBeta1,
  kBeta2,
  kEpsilon,
  kWeightDecay,
  kBiasCorrection1,
  kBiasCorrection2,
  kClipScale,
  kStep,  ///< which step it is: see [Note: rounding by chance]
  kAdamWScalars
};

/// One step of AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2),
/// elementwise:
///
///   g  = clip_scale * grad
///   m  = beta1 * m + (1 - beta1) * g
///   v  = beta2 * v + ((1 - beta2) * g) * g
///   p  = p - (learning_rate * weight_decay) * p          unless the weight decay is 0
///   p  = p - learning_rate * ((m / bias_correction1) / (sqrt(v / bias_correction2) + epsilon))
///
/// where learning rate and weight decay are the scalars times the segment's factors.
/// Every operation is rounded by itself, in this order, as the CUDA kernel does. bias_correction =
/// 1 - beta^t. param: dense [n], f32 or f64; m, v: dense [n], of the same type or, with f32, both bf16, which are
/// rounded stochastically when stored; grad: dense [n], any floating type; segments: f64 [k, 4] of (begin, end,
/// factor of the learning rate, factor of the weight decay), dense (Segment). Elements outside all segments
/// (padding) keep their values.
///
/// `clip_scale`, if given, is a floating scalar that replaces kClipScale: clipping leaves it in device memory. `found_inf`, if given,
/// is an i32 scalar: if it is not 0 nothing is done.
void adamw(const View& param, const View& grad, const View& m, const View& v, const View& segments,
           const View& scalars, const View& clip_scale = {}, const View& found_inf = {});

/// For steps that may be skipped, so that the host does not know their count: increments `applied`, i64 [], unless
/// `found_inf` (View{}: 0) is set; out is `scalars`, f64 [n] with AdamW's first, with the bias corrections of this
/// count.
void count_adamw(const View& scalars, const View& found_inf, const View& applied, const View& out);
/// x^n by squaring: only IEEE products, so that every machine has the same bits.
SHEAF_HOST_DEVICE inline double power(double x, int64_t n) {
  double out = 1.0;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) out *= x;
  return out;
}

enum SgdScalar {
  kSgdLearningRate,
  kSgdMomentum,
  kSgdWeightDecay,
  kSgdClipScale,
  kSgdStep,  ///< as kStep
  kSgdScalars
};

/// One step of SGD with momentum (Sutskever et al. 2013, in PyTorch's form without dampening):
///
///   g = clip_scale * grad + weight_decay * p         (no sum if the weight decay is 0)
///   b = momentum * b + g;   g = nesterov ? g + momentum * b : b      (only with a buffer)
///   p = p - learning_rate * g
///
/// where learning rate and weight decay are the scalars times the segment's factors.
/// `momentum_buffer` is View{} for plain SGD, and may be bf16 with f32 parameters, as m above;
/// `clip_scale` and `found_inf` as above.
void sgd(const View& param, const View& grad, const View& momentum_buffer, const View& segments,
         const View& scalars, bool nesterov, const View& clip_scale = {},
         const View& found_inf = {});

/// param = param - rate * sign(grad), elementwise; no change where grad is NaN. Both dense, of one type, f32 or
/// f64; `found_inf` as above.
void sign_step(const View& param, const View& grad, double rate, const View& found_inf = {});

}  // namespace cpu

/// The same on a GPU, with the same order of scalars: one launch, and the same bits (in f64, where the CPU flushes subnormal numbers,
/// except for those). `segments`, `scalars`, `clip_scale` and `found_inf` are in device memory, so that a recorded step can be
/// replayed and a gradient norm is never copied to the host. Segments must be sorted and not overlap: otherwise only part of the
/// table is applied. Segments are truncated at the end of the shard.
namespace cuda {

void adamw(const Stream& stream, const View& param, const View& grad, const View& m, const View& v,
           const View& segments, const View& scalars, const View& clip_scale = {},
           const View& found_inf = {});
void count_adamw(const Stream& stream, const View& scalars, const View& found_inf,
                 const View& applied, const View& out);
void sgd(const Stream& stream, const View& param, const View& grad, const View& momentum_buffer,
         const View& segments, const View& scalars, bool nesterov, const View& clip_scale = {},
         const View& found_inf = {});
void sign_step(const Stream& stream, const View& param, const View& grad, double rate,
               const View& found_inf = {});

}  // namespace cuda
}  // namespace sheaf::kernels
