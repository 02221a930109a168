// Short convolutions along the tokens, compiled twice ([Note: two builds of one kernel] in simd.h): memory-bound, so that a row is read
// once from memory, and W times from cache. Sizes are named in causal_conv.h.
#include <algorithm>
#include <vector>

#include "sheaf/kernels/causal_conv.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

constexpr int64_t kTokens = 64;  // of a block

template <class T, class C = ComputeType<T>>
class Conv {
 public:
  explicit Conv(const CausalConvOperands& o)
      : x_(o.x), begins_(o.begins), tokens(o.x.shape[1]), channels(o.x.shape[2]), taps(o.weight.shape[1]), silu(o.silu) {
    // Taps of sixteen channels side by side: [taps, channels].
    weight_.resize(static_cast<size_t>(taps * padded()));
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t j = 0; j < taps; ++j)
        weight_[static_cast<size_t>(j * padded() + c)] = static_cast<C>(o.weight.as<const T>()[c * o.weight.strides[0] + j]);
  }

  int64_t padded() const { return (channels + kLanes - 1) / kLanes * kLanes; }
  int64_t blocks() const { return x_.shape[0] * ((tokens + kTokens - 1) / kTokens); }
  const T* row(int64_t b, int64_t t) const { return x_.as<T>() + b * x_.strides[0] + t * x_.strides[1]; }
  int64_t begin(int64_t b, int64_t t) const { return given(begins_) ? begins_.as<int32_t>()[b * begins_.strides[0] + t] : 0; }
  Lanes<C> tap(int64_t j, int64_t c) const { return Lanes<C>::load(weight_.data() + j * padded() + c); }

  /// Σ_j weight[c, j] x[b, t - W + 1 + j, c] of channels from c on.
  template <class N>
  SHEAF_INLINE Lanes<C> at(int64_t b, int64_t t, int64_t begin, int64_t c, N n) const {
    Lanes<C> sum(C(0));
    for (int64_t j = std::max<int64_t>(0, taps - 1 - t + begin); j < taps; ++j) sum = fma(tap(j, c), load_lanes(row(b, t - taps + 1 + j) + c, n), sum);
    return sum;
  }

 private:
  const View &x_, &begins_;
  std::vector<C> weight_;

 public:
  const int64_t tokens, channels, taps;
  const bool silu;
};

template <class C>
SHEAF_INLINE Lanes<C> sigmoid(Lanes<C> v) {
  return Lanes<C>(C(1)) / (Lanes<C>(C(1)) + exp(Lanes<C>(C(0)) - v));
}

/// Calls f(b, first, end, block) for the blocks of tokens, which threads share.
template <class Conv, class F>
void for_blocks(const Conv& conv, F&& f) {
  const int64_t of_sequence = (conv.tokens + kTokens - 1) / kTokens;
  parallel_for(conv.blocks(), row_grain(kTokens * conv.channels), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block % of_sequence * kTokens;
      f(block / of_sequence, first, std::min(first + kTokens, conv.tokens), block);
    }
  });
}

/// dy f'(m), m the convolution, of tokens [first, end) of one sequence: [end - first, channels], padded.
template <class T, class C>
void slopes(const Conv<T>& conv, const View& dy, int64_t b, int64_t first, int64_t end, C* to) {
  for (int64_t t = first; t < end; ++t, to += conv.padded()) {
    const T* row = dy.as<T>() + b * dy.strides[0] + t * dy.strides[1];
    const int64_t begin = conv.begin(b, t);
    for_lanes(conv.channels, [&](int64_t c, auto n) {
      Lanes<C> g = load_lanes(row + c, n);
      if (conv.silu) {
        const Lanes<C> m = conv.at(b, t, begin, c, n), s = sigmoid(m), one(C(1));
        g = g * s * fma(m, one - s, one);
      }
      g.store(to + c);
    });
  }
}

}  // namespace

void causal_conv(const CausalConvOperands& x, const View& y) {
  visit_floating("causal_conv", y.dtype, [&]<class T>() {
    const Conv<T> conv(x);
    for_blocks(conv, [&](int64_t b, int64_t first, int64_t end, int64_t) {
      for (int64_t t = first; t < end; ++t) {
        T* to = y.as<T>() + b * y.strides[0] + t * y.strides[1];
        const int64_t begin = conv.begin(b, t);
        for_lanes(conv.channels, [&](int64_t c, auto n) {
          const auto m = conv.at(b, t, begin, c, n);
          store_lanes(to + c, conv.silu ? m * sigmoid(m) : m, n);
        });
      }
    });
  });
}

void causal_conv_backward(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight, Workspace workspace) {
  visit_floating("causal_conv_backward", dy.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const Conv<T> conv(x);
    const int64_t padded = conv.padded(), taps = conv.taps, channels = conv.channels;
    C* parts = static_cast<C*>(workspace.data);  // [blocks, channels, taps]
    for_blocks(conv, [&](int64_t b, int64_t first, int64_t end, int64_t block) {
      // Of the tokens of the block, and those behind it that read some of them.
      const int64_t last = given(dx) ? std::min(end + taps - 1, conv.tokens) : end;
      std::vector<C> g(static_cast<size_t>((last - first) * padded));
      slopes(conv, dy, b, first, last, g.data());
      for (int64_t t = first; t < end && given(dx); ++t) {
        T* to = dx.as<T>() + b * dx.strides[0] + t * dx.strides[1];
        for_lanes(channels, [&](int64_t c, auto n) {
          Lanes<C> sum(C(0));
          for (int64_t s = t; s < std::min(t + taps, last) && conv.begin(b, s) <= t; ++s)
            sum = fma(conv.tap(taps - 1 - s + t, c), Lanes<C>::load(g.data() + (s - first) * padded + c), sum);
          store_lanes(to + c, sum, n);
        });
      }
      if (!given(dweight)) return;
      for_lanes(channels, [&](int64_t c, auto n) {
        for (int64_t j = 0; j < taps; ++j) {
          Lanes<C> sum(C(0));
          for (int64_t t = first; t < end; ++t)
            if (const int64_t read = t - taps + 1 + j; read >= conv.begin(b, t))
              sum = fma(Lanes<C>::load(g.data() + (t - first) * padded + c), load_lanes(conv.row(b, read) + c, n), sum);
          C lanes[kLanes];
          sum.store(lanes);
          for (int64_t i = 0; i < std::min<int64_t>(kLanes, channels - c); ++i) parts[(block * channels + c + i) * taps + j] = lanes[i];
        }
      });
    });
    if (!given(dweight)) return;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t j = 0; j < taps; ++j) {
        C sum = 0;
        for (int64_t block = 0; block < conv.blocks(); ++block) sum += parts[(block * channels + c) * taps + j];
        dweight.as<C>()[c * dweight.strides[0] + j] = sum;
      }
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
