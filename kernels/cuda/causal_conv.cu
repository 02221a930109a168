#include "sheaf/kernels/causal_conv.h"
#include "sheaf/kernels/causal_conv_operands.h"
#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/workspace.h"

// A thread has 16 bytes of channels and loops over a run of tokens. With up to kFew taps it keeps the tokens that they reach in
// registers, so that each is read once, except for those around the run, and requests the next one before it computes; with more,
// tokens and weights are reread from caches.
namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kFew = 4;           ///< taps: fewer count as this many, the first ones with weights of zero
constexpr int kForwardRun = 16;   ///< tokens: with longer runs there are too few threads
constexpr int kBackwardRun = 64;  ///< tokens: the blocks of dweight's sums

__device__ float exp_of(float x) { return expf(x); }
__device__ double exp_of(double x) { return ::exp(x); }

/// [B, T, C], the channels dense.
template <class T>
struct Channels {
  T* data;
  int64_t batch, time;  ///< strides
  explicit Channels(const View& v) : data(v.as<T>()), batch(v.strides[0]), time(v.strides[1]) {}
  __device__ T* row(int64_t b, int64_t t) const { return data + b * batch + t * time; }
};

template <class T>
struct Conv {
  int64_t batch, tokens, channels;
  int taps;
  bool silu;
  Channels<const T> x;
  const T* weight;
  int64_t weight_pitch;
  const int32_t* begins;  ///< null: there is one document
  int64_t begins_batch;

  explicit Conv(const CausalConvOperands& o)
      : batch(o.x.shape[0]), tokens(o.x.shape[1]), channels(o.x.shape[2]), taps(static_cast<int>(o.weight.shape[1])), silu(o.silu),
        x(o.x), weight(o.weight.as<const T>()), weight_pitch(o.weight.strides[0]),
        begins(given(o.begins) ? o.begins.as<const int32_t>() : nullptr), begins_batch(given(o.begins) ? o.begins.strides[0] : 0) {}

  /// The first token that taps of token t may read.
  __device__ int64_t begin(int64_t b, int64_t t) const {
    const int64_t at = begins ? begins[b * begins_batch + t] : 0;
    return at < 0 ? 0 : at;
  }
};

/// One value for each channel of a thread.
template <class T>
struct Values {
  using C = Compute<T>;
  static constexpr int kSize = Pack<T>::kSize;
  C v[kSize] = {};

  Values() = default;
  __device__ Values(const T* row, int64_t channel, int64_t channels) {
    const Pack<T> pack = load_chunk(row, channel, channels);
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] = convert_to<C>(pack.v[k]);
  }
  /// From load_raw.
  __device__ explicit Values(const uint4& raw) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] = convert_to<C>(element_of<T>(raw, k));
  }
  /// Tap j of a weight.
  __device__ Values(const Conv<T>& p, int64_t channel, int j) {
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      v[k] = channel + k < p.channels ? convert_to<C>(p.weight[(channel + k) * p.weight_pitch + j]) : C(0);
  }
  __device__ void add(const Values& a, const Values& b) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] = fused_sum(a.v[k], b.v[k], v[k]);
  }
  __device__ void store(T* row, int64_t channel, int64_t channels) const {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < kSize; ++k) pack.v[k] = element<T>(v[k]);
    store_chunk(row, channel, channels, pack);
  }
  __device__ void silu() {
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] = v[k] / (C(1) + exp_of(-v[k]));
  }
  /// Multiplies by the derivative of silu at x.
  __device__ void scale_by_slope(const Values& x) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const C s = C(1) / (C(1) + exp_of(-x.v[k]));
      v[k] *= s * (C(1) + x.v[k] * (C(1) - s));
    }
  }
};

/// The tokens that few taps reach: x[j] is at tap j.
template <class T>
struct Window {
  Values<T> weight[kFew], x[kFew];
  int absent;  ///< this many of the first are not taps

  __device__ Window(const Conv<T>& p, int64_t b, int64_t first, int64_t channel) : absent(kFew - p.taps) {
    uint4 raw[kFew];  // all are requested, with the weights, before one is taken apart, which waits for it
#pragma unroll
    for (int j = 1; j < kFew; ++j)
      if (first + j >= kFew) raw[j] = load_raw(p.x.row(b, first - kFew + j), channel, p.channels);
#pragma unroll
    for (int j = 0; j < kFew; ++j)
      if (j >= absent) weight[j] = Values<T>(p, channel, j - absent);
#pragma unroll
    for (int j = 1; j < kFew; ++j)
      if (first + j >= kFew) x[j] = Values<T>(raw[j]);
  }
  /// Moves on to the next token.
  __device__ void advance(const Values<T>& token) {
#pragma unroll
    for (int j = 0; j + 1 < kFew; ++j) x[j] = x[j + 1];
    x[kFew - 1] = token;
  }
  /// True if there is a tap j, and at token t it reads one of the same document.
  __device__ bool reaches(int64_t t, int j, int64_t begin) const { return j >= absent && t - (kFew - 1) + j >= begin; }
  __device__ Values<T> sum(int64_t t, int64_t begin) const {
    Values<T> out;
#pragma unroll
    for (int j = 0; j < kFew; ++j)
      if (reaches(t, j, begin)) out.add(weight[j], x[j]);
    return out;
  }
};

/// The sum at token t with any number of taps.
template <class T>
__device__ Values<T> sum_of_many(const Conv<T>& p, int64_t b, int64_t t, int64_t channel) {
  Values<T> out;
  const int64_t begin = p.begin(b, t), first = t - p.taps + 1;
  for (int64_t s = first < begin ? begin : first; s <= t; ++s)
    out.add(Values<T>(p, channel, static_cast<int>(s - first)), Values<T>(p.x.row(b, s), channel, p.channels));
  return out;
}

/// A thread's work: channels, none if past the last, and a run of tokens of sequence b.
template <class T>
struct Run {
  int64_t channel, b, first, behind;
  __device__ Run(const Conv<T>& p, int64_t run) {
    const int64_t columns = blocks_for(p.channels, kThreads * Pack<T>::kSize), runs = blocks_for(p.tokens, run);
    const int64_t n = blockIdx.x / columns;
    channel = (blockIdx.x % columns * kThreads + threadIdx.x) * Pack<T>::kSize;
    b = n / runs, first = n % runs * run, behind = first + run < p.tokens ? first + run : p.tokens;
  }
};

template <class T>
int64_t blocks_of(const Conv<T>& p, int64_t run) {
  return p.batch * blocks_for(p.tokens, run) * blocks_for(p.channels, kThreads * Pack<T>::kSize);
}

template <class T>
__global__ void __launch_bounds__(kThreads) convolve(Conv<T> p, Channels<T> y) {
  const Run<T> r(p, kForwardRun);
  if (r.channel >= p.channels) return;
  uint4 next = load_raw(p.x.row(r.b, r.first), r.channel, p.channels);
  Window<T> window(p, r.b, r.first, r.channel);
#pragma unroll 4
  for (int64_t t = r.first; t < r.behind; ++t) {
    window.advance(Values<T>(next));
    if (t + 1 < r.behind) next = load_raw(p.x.row(r.b, t + 1), r.channel, p.channels);
    Values<T> sum = window.sum(t, p.begin(r.b, t));
    if (p.silu) sum.silu();
    sum.store(y.row(r.b, t), r.channel, p.channels);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) convolve_many(Conv<T> p, Channels<T> y) {
  const Run<T> r(p, kForwardRun);
  if (r.channel >= p.channels) return;
  for (int64_t t = r.first; t < r.behind; ++t) {
    Values<T> sum = sum_of_many(p, r.b, t, r.channel);
    if (p.silu) sum.silu();
    sum.store(y.row(r.b, t), r.channel, p.channels);
  }
}

template <class T>
struct Gradients {
  Channels<const T> dy;
  Channels<T> dx;
  Compute<T>* partials;  ///< of dweight, [W, C] for each run; null: not needed

  __device__ Compute<T>* partial(const Conv<T>& p, const Run<T>& r, int tap) const {
    const int64_t run = r.b * blocks_for(p.tokens, kBackwardRun) + r.first / kBackwardRun;
    return partials + (run * p.taps + tap) * p.channels;
  }
};
template <class T>
__device__ void store_partial(const Values<T>& sum, Compute<T>* row, int64_t channel, int64_t channels) {
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k)
    if (channel + k < channels) row[channel + k] = sum.v[k];
}

// The gradient of a token is complete after the last token that reaches it: so the loop continues for kFew - 1 tokens after the run.
template <class T>
__global__ void __launch_bounds__(kThreads) convolve_backward(Conv<T> p, Gradients<T> d) {
  const Run<T> r(p, kBackwardRun);
  if (r.channel >= p.channels) return;
  const int64_t reached = r.behind + kFew - 1, end = reached < p.tokens ? reached : p.tokens;
  uint4 next = load_raw(p.x.row(r.b, r.first), r.channel, p.channels), next_dy = load_raw(d.dy.row(r.b, r.first), r.channel, p.channels);
  Window<T> window(p, r.b, r.first, r.channel);
  Values<T> dsum[kFew], dweight[kFew];  // dsum[i]: of token t - (kFew - 1) + i
  int64_t begins[kFew];
#pragma unroll
  for (int i = 0; i < kFew; ++i) begins[i] = p.tokens;
  for (int64_t t = r.first; t < reached; ++t) {
#pragma unroll
    for (int i = 0; i + 1 < kFew; ++i) dsum[i] = dsum[i + 1], begins[i] = begins[i + 1];
    dsum[kFew - 1] = {}, begins[kFew - 1] = p.tokens;  // a token past the end reaches no other
    if (t < end) {
      window.advance(Values<T>(next));
      begins[kFew - 1] = p.begin(r.b, t);
      dsum[kFew - 1] = Values<T>(next_dy);
      if (t + 1 < end) {
        next = load_raw(p.x.row(r.b, t + 1), r.channel, p.channels);
        next_dy = load_raw(d.dy.row(r.b, t + 1), r.channel, p.channels);
      }
      if (p.silu) dsum[kFew - 1].scale_by_slope(window.sum(t, begins[kFew - 1]));
    }
    if (t < r.behind)
#pragma unroll
      for (int j = 0; j < kFew; ++j)
        if (window.reaches(t, j, begins[kFew - 1])) dweight[j].add(dsum[kFew - 1], window.x[j]);
    const int64_t s = t - (kFew - 1);
    if (!d.dx.data || s < r.first) continue;
    Values<T> dx;
#pragma unroll
    for (int j = 0; j < kFew; ++j)
      if (j >= window.absent && begins[kFew - 1 - j] <= s) dx.add(window.weight[j], dsum[kFew - 1 - j]);
    dx.store(d.dx.row(r.b, s), r.channel, p.channels);
  }
  if (!d.partials) return;
#pragma unroll
  for (int j = 0; j < kFew; ++j)
    if (const int tap = j - (kFew - p.taps); tap >= 0) store_partial(dweight[j], d.partial(p, r, tap), r.channel, p.channels);
}

/// The gradient of the sum at token t, which is recomputed.
template <class T>
__device__ Values<T> dsum_of_many(const Conv<T>& p, const Gradients<T>& d, int64_t b, int64_t t, int64_t channel) {
  Values<T> out(d.dy.row(b, t), channel, p.channels);
  if (p.silu) out.scale_by_slope(sum_of_many(p, b, t, channel));
  return out;
}

template <class T>
__global__ void __launch_bounds__(kThreads) convolve_many_backward(Conv<T> p, Gradients<T> d) {
  const Run<T> r(p, kBackwardRun);
  if (r.channel >= p.channels) return;
  for (int64_t s = r.first; d.dx.data && s < r.behind; ++s) {
    Values<T> dx;
    for (int j = 0; j < p.taps; ++j) {
      const int64_t t = s + p.taps - 1 - j;
      if (t < p.tokens && p.begin(r.b, t) <= s) dx.add(Values<T>(p, r.channel, j), dsum_of_many(p, d, r.b, t, r.channel));
    }
    dx.store(d.dx.row(r.b, s), r.channel, p.channels);
  }
  for (int j = 0; d.partials && j < p.taps; ++j) {
    Values<T> dweight;
    for (int64_t t = r.first; t < r.behind; ++t) {
      const int64_t s = t - (p.taps - 1) + j;
      if (s >= p.begin(r.b, t))
        dweight.add(dsum_of_many(p, d, r.b, t, r.channel), Values<T>(p.x.row(r.b, s), r.channel, p.channels));
    }
    store_partial(dweight, d.partial(p, r, j), r.channel, p.channels);
  }
}

/// A thread computes an element of dweight [C, W], and adds the sums of runs in order.
template <class C>
__global__ void __launch_bounds__(kThreads) add_runs(const C* partials, int64_t runs, int taps, int64_t channels, C* dweight,
                                                     int64_t pitch) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= taps * channels) return;
  C sum = C(0);
#pragma unroll 8
  for (int64_t run = 0; run < runs; ++run) sum += partials[run * taps * channels + n];
  dweight[n % channels * pitch + n / channels] = sum;
}

int64_t runs_of(const View& x) { return x.shape[0] * blocks_for(x.shape[1], kBackwardRun); }

}  // namespace

void causal_conv(const Stream& stream, const CausalConvOperands& x, const View& y) {
  const char* who = "causal_conv";
  check_causal_conv(who, x, y);
  if (y.numel() == 0) return;
  visit_floating(who, y.dtype, [&]<class T>() {
    const Conv<T> p(x);
    launch(who, stream, {.blocks = blocks_of(p, kForwardRun), .threads = kThreads}, p.taps <= kFew ? convolve<T> : convolve_many<T>, p,
           Channels<T>(y));
  });
}

size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View&, const View&, const View& dweight) {
  if (!given(dweight)) return 0;
  return line_align(static_cast<size_t>(runs_of(x.x) * x.weight.numel()) * (x.x.dtype == kF64 ? 8 : 4));
}

void causal_conv_backward(const Stream& stream, const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight,
                          Workspace workspace) {
  const char* who = "causal_conv_backward";
  check_causal_conv_backward(who, x, dy, dx, dweight);
  if (x.weight.numel() == 0) return;
  visit_floating(who, dy.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Conv<T> p(x);
    const int64_t runs = runs_of(x.x);
    Carver carver(who, workspace);
    C* const partials = given(dweight) ? carver.take<C>(runs * x.weight.numel()) : nullptr;
    Gradients<T> d{Channels<const T>(dy), Channels<T>(given(dx) ? dx : dy), partials};
    if (!given(dx)) d.dx.data = nullptr;
    launch(who, stream, {.blocks = blocks_of(p, kBackwardRun), .threads = kThreads},
           p.taps <= kFew ? convolve_backward<T> : convolve_many_backward<T>, p, d);
    if (given(dweight))  // zeros, where there are no tokens and so no partial sums
      launch(who, stream, {.blocks = blocks_for(x.weight.numel(), kThreads), .threads = kThreads}, add_runs<C>,
             static_cast<const C*>(partials), runs, p.taps, p.channels, dweight.as<C>(), dweight.strides[0]);
  });
}

}  // namespace sheaf::kernels::cuda
