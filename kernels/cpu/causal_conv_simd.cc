// Short convolutions along the tokens, compiled twice ([Note: two builds of one kernel] in simd.h): memory-bound, in squares with few
// enough channels that the W taps reread from the nearest cache. Sizes are named in causal_conv.h.
#include <algorithm>
#include <vector>

#include "sheaf/kernels/causal_conv.h"
#include "sheaf/kernels/cpu/causal_conv_squares.h"
#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

template <class T, class C = ComputeType<T>>
class Conv {
 public:
  explicit Conv(const CausalConvOperands& o)
      : x_(o.x.as<const T>()),
        begins_(given(o.begins) ? o.begins.as<const int32_t>() : nullptr),
        sequence_(o.x.strides[0]),
        token_(o.x.strides[1]),
        begins_of_sequence_(begins_ ? o.begins.strides[0] : 0),
        padded_(padded(o.x.shape[2])),
        squares(o),
        taps(o.weight.shape[1]),
        silu(o.silu) {
    // Taps of sixteen channels side by side: [taps, channels].
    weight_.resize(static_cast<size_t>(taps * padded_));
    for (int64_t c = 0; c < squares.channels; ++c)
      for (int64_t j = 0; j < taps; ++j)
        weight_[static_cast<size_t>(j * padded_ + c)] = static_cast<C>(o.weight.as<const T>()[c * o.weight.strides[0] + j]);
  }

  /// The row that tap j of token t reads.
  const T* row(int64_t b, int64_t t, int64_t j) const { return x_ + b * sequence_ + (t - taps + 1 + j) * token_; }
  /// The first tap of token t that reads inside its document.
  int64_t first_tap(int64_t b, int64_t t) const { return std::max<int64_t>(0, taps - 1 - t + begin(b, t)); }
  int64_t begin(int64_t b, int64_t t) const { return begins_ ? std::max(begins_[b * begins_of_sequence_ + t], 0) : 0; }
  Lanes<C> tap(int64_t j, int64_t c) const { return Lanes<C>::load(weight_.data() + j * padded_ + c); }

  /// Σ_j weight[c, j] x[b, t - W + 1 + j, c] of channels from c on, j from `first` on; `row` is the row that tap 0 reads.
  template <class N>
  SHEAF_INLINE Lanes<C> at(const T* row, int64_t first, int64_t c, N n) const {
    Lanes<C> sum(C(0));
    for (int64_t j = first; j < taps; ++j) sum = fma(tap(j, c), load_lanes(row + j * token_ + c, n), sum);
    return sum;
  }

 private:
  const T* x_;
  const int32_t* begins_;
  int64_t sequence_, token_, begins_of_sequence_, padded_;
  std::vector<C> weight_;

 public:
  const ConvSquares squares;
  const int64_t taps;
  const bool silu;
};

template <class C>
SHEAF_INLINE Lanes<C> sigmoid(Lanes<C> v) {
  return Lanes<C>(C(1)) / (Lanes<C>(C(1)) + exp(Lanes<C>(C(0)) - v));
}

/// Calls f(c, n) for the channels of a square, sixteen at a time.
template <class F>
SHEAF_INLINE void for_channels(const ConvSquare& s, F&& f) {
  for_lanes(s.channels, [&](int64_t c, auto n) { f(s.first_channel + c, n); });
}

/// dy f'(m), m the convolution, of a square's channels and tokens up to `end`: rows of kConvChannels.
template <class T, class C>
void slopes(const Conv<T>& conv, const View& dy, const ConvSquare& s, int64_t end, C* to) {
  for (int64_t t = s.first; t < end; ++t, to += kConvChannels) {
    const T *from = dy.as<T>() + s.sequence * dy.strides[0] + t * dy.strides[1], *row = conv.row(s.sequence, t, 0);
    const int64_t first_tap = conv.first_tap(s.sequence, t);
    for_channels(s, [&](int64_t c, auto n) {
      Lanes<C> g = load_lanes(from + c, n);
      if (conv.silu) {
        const Lanes<C> m = conv.at(row, first_tap, c, n), y = sigmoid(m), one(C(1));
        g = g * y * fma(m, one - y, one);
      }
      g.store(to + c - s.first_channel);
    });
  }
}

/// dx of a square, from the slopes of its tokens and of later ones that read some of them.
template <class T, class C>
void store_dx(const Conv<T>& conv, const ConvSquare& s, int64_t end, const C* g, const View& dx) {
  for (int64_t t = s.first; t < s.end; ++t, g += kConvChannels) {
    T* to = dx.as<T>() + s.sequence * dx.strides[0] + t * dx.strides[1];
    int64_t readers = 1;
    while (readers < conv.taps && t + readers < end && conv.begin(s.sequence, t + readers) <= t) ++readers;
    for_channels(s, [&](int64_t c, auto n) {
      Lanes<C> sum(C(0));
      for (int64_t i = 0; i < readers; ++i)
        sum = fma(conv.tap(conv.taps - 1 - i, c), Lanes<C>::load(g + i * kConvChannels + c - s.first_channel), sum);
      store_lanes(to + c, sum, n);
    });
  }
}

/// A square's contribution to dweight: [taps, channels], padded.
template <class T, class C>
void store_part(const Conv<T>& conv, const ConvSquare& s, const C* g, C* to) {
  int64_t first_taps[kConvTokens];
  for (int64_t t = s.first; t < s.end; ++t) first_taps[t - s.first] = conv.first_tap(s.sequence, t);
  for (int64_t j = 0; j < conv.taps; ++j, to += conv.squares.padded_channels())
    for_channels(s, [&](int64_t c, auto n) {
      Lanes<C> sum(C(0));
      for (int64_t t = s.first; t < s.end; ++t)
        if (j >= first_taps[t - s.first])
          sum = fma(Lanes<C>::load(g + (t - s.first) * kConvChannels + c - s.first_channel), load_lanes(conv.row(s.sequence, t, j) + c, n),
                    sum);
      sum.store(to + c);
    });
}

/// dweight = the sum of the parts of all blocks of tokens, in order.
template <class C>
void add_parts(const C* parts, const ConvSquares& s, const View& dweight) {
  const int64_t taps = dweight.shape[1], padded = s.padded_channels();
  parallel_for((s.channels + kLanes - 1) / kLanes, row_grain(s.blocks() * taps * kLanes), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin * kLanes; c < std::min(end * kLanes, s.channels); c += kLanes)
      for (int64_t j = 0; j < taps; ++j) {
        Lanes<C> sum(C(0));
        for (int64_t block = 0; block < s.blocks(); ++block) sum = sum + Lanes<C>::load(parts + (block * taps + j) * padded + c);
        C lanes[kLanes];
        sum.store(lanes);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, s.channels - c); ++i)
          dweight.as<C>()[(c + i) * dweight.strides[0] + j] = lanes[i];
      }
  });
}

}  // namespace

void causal_conv(const CausalConvOperands& x, const View& y) {
  visit_floating("causal_conv", y.dtype, [&]<class T>() {
    const Conv<T> conv(x);
    parallel_for(conv.squares.count(), conv.squares.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const ConvSquare s = conv.squares[i];
        for (int64_t t = s.first; t < s.end; ++t) {
          T* to = y.as<T>() + s.sequence * y.strides[0] + t * y.strides[1];
          const T* row = conv.row(s.sequence, t, 0);
          const int64_t first_tap = conv.first_tap(s.sequence, t);
          for_channels(s, [&](int64_t c, auto n) {
            const auto m = conv.at(row, first_tap, c, n);
            store_lanes(to + c, conv.silu ? m * sigmoid(m) : m, n);
          });
        }
      }
    });
  });
}

void causal_conv_backward(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight, Workspace workspace) {
  visit_floating("causal_conv_backward", dy.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const Conv<T> conv(x);
    const ConvSquares& squares = conv.squares;
    Carver carver("causal_conv_backward", workspace);
    C* slopes_of = carver.take<C>(squares.slots() * squares.slope_cells(conv.taps));
    C* parts = given(dweight) ? carver.take<C>(squares.part_cells(conv.taps)) : nullptr;
    parallel_slots(squares.count(), squares.slots(), [&](int64_t slot, int64_t begin, int64_t end) {
      C* g = slopes_of + slot * squares.slope_cells(conv.taps);
      for (int64_t i = begin; i < end; ++i) {
        const ConvSquare s = squares[i];
        const int64_t last = given(dx) ? std::min(s.end + conv.taps - 1, squares.tokens) : s.end;
        slopes(conv, dy, s, last, g);
        if (given(dx)) store_dx(conv, s, last, g, dx);
        if (parts) store_part(conv, s, g, parts + s.block * conv.taps * squares.padded_channels());
      }
    });
    if (parts) add_parts(parts, squares, dweight);
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
