// A call of causal attention on operands packed as a projection writes them, to be timed.
#pragma once

#include <cmath>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/tools/bench/array.h"

namespace sheaf::bench {

/// B sequences of T tokens, H query heads, G key-value heads, head dimension D, value dimension E.
struct AttentionSize {
  int64_t b, t, h, g, d;
  int64_t e = 0;  ///< 0: D
  int64_t values() const { return e ? e : d; }
};

class AttentionCall {
 public:
  /// `document`: tokens per document, of which the sequences consist; 0: each sequence is one document. `window`: keys per window; 0:
  /// no window. `ours`: on a GPU use our own kernels, whichever would be chosen otherwise. `softcap`: the cap of the scores; 0: none.
  AttentionCall(DType dtype, const AttentionSize& s, Device device, int64_t document = 0, int64_t window = 0, bool ours = false, double softcap = 0)
      : qkv_(Array(dtype, {s.b, s.t, s.h + 2 * s.g, s.d}).on(device)),
        dqkv_(Array(dtype, {s.b, s.t, s.h + 2 * s.g, s.d}).on(device)),
        out_(Array(dtype, {s.b, s.t, s.h, s.values()}).on(device)),
        dout_(Array(dtype, {s.b, s.t, s.h, s.values()}).on(device)),
        lse_(Array(kF32, {s.b, s.h, s.t}).on(device)),
        begins_(Array::begins({s.b, s.t}, document ? document : s.t).on(device)),
        mask_(true, document ? begins_.view() : View(), window, softcap),
        q_(heads(qkv_, 0, s.h, s.d)),
        k_(heads(qkv_, s.h, s.g, s.d)),
        v_(heads(qkv_, s.h + s.g, s.g, s.values())),
        dq_(heads(dqkv_, 0, s.h, s.d)),
        dk_(heads(dqkv_, s.h, s.g, s.d)),
        dv_(heads(dqkv_, s.h + s.g, s.g, s.values())),
        scale_(1 / std::sqrt(static_cast<double>(s.d))),
        ours_(ours && device.is_cuda()),
        scratch_(
            static_cast<size_t>(SHEAF_WORKSPACE(device, attention, q_, k_, v_, mask_, out_, lse_)),
            device),
        backward_scratch_(
            static_cast<size_t>(SHEAF_WORKSPACE(device, attention_backward, q_, k_, v_, out_, lse_,
                                                dout_, mask_, dq_, dk_, dv_)),
            device) {}

  void forward(const Stream& stream) const {
    if constexpr (kernels::kHasCuda)
      if (ours_) return kernels::cuda::blocked::attention(stream, q_, k_, v_, mask_, scale_, out_, lse_);
    SHEAF_ON_DEVICE(stream, attention, q_, k_, v_, mask_, scale_, out_, lse_, scratch_);
  }
  /// Reads what forward() has written.
  void backward(const Stream& stream) const {
    if constexpr (kernels::kHasCuda)
      if (ours_)
        return kernels::cuda::blocked::attention_backward(stream, q_, k_, v_, out_, lse_, dout_, mask_, scale_, dq_, dk_, dv_,
                                                          backward_scratch_);
    SHEAF_ON_DEVICE(stream, attention_backward, q_, k_, v_, out_, lse_, dout_, mask_, scale_, dq_,
                    dk_, dv_, backward_scratch_);
  }

  /// Floating-point operations. A product of T x D with D x T under a causal mask takes B H T² D: half of 2 B H T² D. The forward
  /// pass has two such products, one of which involves values; the backward pass has five, two of which do, because it recomputes the
  /// scores (Dao 2023).
  static double flops(const AttentionSize& s, bool backward) {
    const int64_t width = backward ? 3 * s.d + 2 * s.values() : s.d + s.values();
    return static_cast<double>(s.b * s.h * s.t * s.t * width);
  }

 private:
  // The first `width` elements of heads [first, first + count) of a packed projection [B, T, H + 2 G, D].
  static View heads(const Array& packed, int64_t first, int64_t count, int64_t width) {
    View v = packed.view();
    v.data = v.as<char>() + first * v.shape[3] * static_cast<int64_t>(size_of(v.dtype));
    v.shape[2] = count, v.shape[3] = width;
    return v;
  }

  const Array qkv_, dqkv_, out_, dout_, lse_, begins_;
  const kernels::AttentionMask mask_;
  const View q_, k_, v_, dq_, dk_, dv_;
  const double scale_;
  const bool ours_;
  const Scratch scratch_, backward_scratch_;
};

}  // namespace sheaf::bench
