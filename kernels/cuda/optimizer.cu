#include <algorithm>

#include "sheaf/kernels/cuda/numbers.h"
#include "sheaf/kernels/optimizer.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of each array in flight per thread; one search serves them all

/// Floating numbers that earlier work has left in device memory.
struct Scalars {
  const void* data;
  bool f64;  // else f32
};
template <class C>
__device__ C scalar_at(const Scalars& s, int i) {
  return s.f64 ? static_cast<C>(static_cast<const double*>(s.data)[i])
               : static_cast<C>(static_cast<const float*>(s.data)[i]);
}

/// A parameter's optimizer state is kStates arrays.
template <int kStates>
struct Shard {
  void* param;
  const void* grad;
  void* state[kStates > 0 ? kStates : 1];
  int64_t numel;
  const Segment* segments;
  int64_t count;
  Scalars scalars;
  Scalars clip_scale;        // replaces one of them, unless null
  const int32_t* found_inf;  // if set, no step; null: not set
  bool vectors;              // all arrays are aligned for whole vectors
};

// The order of operations is guaranteed by the header; the file is compiled with -fmad=false -ftz=true.

/// Learning rate and weight decay in a segment.
template <class C>
struct Rates {
  C lr, decay;
};

struct AdamW {
  static constexpr int kStates = 2, kScalars = cpu::kAdamWScalars, kClip = cpu::kClipScale,
                       kStep = cpu::kStep, kLr = cpu::kLearningRate, kDecay = cpu::kWeightDecay;
  template <class C>
  __device__ static void update(const AdamW&, const C* s, const Rates<C>& rates, C grad, C& p,
                                C* state) {
    const C g = s[cpu::kClipScale] * grad;
    const C mean = s[cpu::kBeta1] * state[0] + (C(1) - s[cpu::kBeta1]) * g;
    const C square = s[cpu::kBeta2] * state[1] + ((C(1) - s[cpu::kBeta2]) * g) * g;
    state[0] = mean, state[1] = square;
    if (rates.decay != 0) p = p - (rates.lr * rates.decay) * p;
    p = p - rates.lr * ((mean / s[cpu::kBiasCorrection1]) /
                        (root(square / s[cpu::kBiasCorrection2]) + s[cpu::kEpsilon]));
  }
  __device__ static float root(float x) { return sqrtf(x); }
  __device__ static double root(double x) { return ::sqrt(x); }
};

template <bool kMomentum>
struct Sgd {
  static constexpr int kStates = kMomentum ? 1 : 0, kScalars = cpu::kSgdScalars,
                       kClip = cpu::kSgdClipScale, kStep = cpu::kSgdStep,
                       kLr = cpu::kSgdLearningRate, kDecay = cpu::kSgdWeightDecay;
  bool nesterov;
  template <class C>
  __device__ static void update(const Sgd& self, const C* s, const Rates<C>& rates, C grad, C& p,
                                C* state) {
    C g = s[cpu::kSgdClipScale] * grad;
    if (rates.decay != 0) g = g + rates.decay * p;
    if constexpr (kMomentum) {
      const C b = s[cpu::kSgdMomentum] * state[0] + g;
      state[0] = b;
      g = self.nesterov ? g + s[cpu::kSgdMomentum] * b : b;
    }
    p = p - rates.lr * g;
  }
};

/// Adjacent elements that are processed together: 16 bytes of a parameter.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vector {
  T v[kSize];
};

/// As they are loaded: narrow elements would be waited for at once, to be taken apart.
template <class T, int kSize>
using Words = Vector<unsigned, static_cast<int>(sizeof(T)) * kSize / 4>;

template <class T, int kSize>
__device__ Words<T, kSize> load(const T* from, int count, bool whole) {
  if (whole) return *reinterpret_cast<const Words<T, kSize>*>(from);
  Vector<T, kSize> part;
#pragma unroll
  for (int k = 0; k < kSize; ++k) part.v[k] = k < count ? from[k] : T{};
  Words<T, kSize> out;
  memcpy(&out, &part, sizeof out);
  return out;
}
template <class T, int kSize>
__device__ Vector<T, kSize> elements_of(const Words<T, kSize>& words) {
  Vector<T, kSize> out;
  memcpy(static_cast<void*>(&out), &words, sizeof out);
  return out;
}
template <class T, int kSize>
__device__ void store(T* to, const Vector<T, kSize>& x, int count, bool whole) {
  if (whole) {
    *reinterpret_cast<Vector<T, kSize>*>(to) = x;
    return;
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k)
    if (k < count) to[k] = x.v[k];
}

/// The first segment in [low, high) that ends after `element`; `high` if none does.
__device__ int64_t find_segment(const Segment* segments, int64_t low, int64_t high,
                                int64_t element) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(segments[middle].end) > element)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/// If state S is stored in bf16 rather than C, it is rounded stochastically.
template <class S, class C>
inline constexpr bool kRounds = !std::is_same_v<S, C>;
template <class S, class C>
__device__ S at_rest(C x, uint32_t noise) {
  if constexpr (kRounds<S, C>) {
    S out;
    out.bits = rounded_by_chance(__float_as_uint(x), noise);
    return out;
  } else {
    return x;
  }
}

template <class C, class G, class S, class Rule>
__global__ void __launch_bounds__(kThreads) step(Rule rule, Shard<Rule::kStates> shard) {
  constexpr int kSize = 16 / sizeof(C), kStates = Rule::kStates;
  constexpr int64_t kBlock = int64_t{kThreads} * kSize * kVectors;
  if (shard.found_inf && *shard.found_inf != 0) return;
  const int64_t begin = blockIdx.x * kBlock, last = std::min(begin + kBlock, shard.numel) - 1;
  C* const param = static_cast<C*>(shard.param);
  const G* const grad = static_cast<const G*>(shard.grad);

  // The arrays are loaded while the segments are searched for.
  Words<C, kSize> param_words[kVectors];
  Words<S, kSize> state_words[kVectors][kStates > 0 ? kStates : 1];
  Words<G, kSize> grad_words[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int64_t i = begin + (int64_t{j} * kThreads + threadIdx.x) * kSize;
    const int count = i > last ? 0 : static_cast<int>(std::min(last - i + 1, int64_t{kSize}));
    const bool whole = shard.vectors && count == kSize;
    param_words[j] = load<C, kSize>(param + i, count, whole), grad_words[j] = load<G, kSize>(grad + i, count, whole);
    for (int k = 0; k < kStates; ++k)
      state_words[j][k] = load<S, kSize>(static_cast<const S*>(shard.state[k]) + i, count, whole);
  }

  __shared__ int64_t first_and_last[2];  // segments of this block's elements
  if (threadIdx.x < 2)
    first_and_last[threadIdx.x] =
        find_segment(shard.segments, 0, shard.count, threadIdx.x == 0 ? begin : last);
  C s[Rule::kScalars];
#pragma unroll
  for (int k = 0; k < Rule::kScalars; ++k) s[k] = scalar_at<C>(shard.scalars, k);
  if (shard.clip_scale.data) s[Rule::kClip] = scalar_at<C>(shard.clip_scale, 0);
  const uint32_t key = noise_key(static_cast<float>(s[Rule::kStep]));
  __syncthreads();

#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int64_t i = begin + (int64_t{j} * kThreads + threadIdx.x) * kSize;
    if (i > last) return;
    const int count = static_cast<int>(std::min(last - i + 1, int64_t{kSize}));
    Vector<C, kSize> p = elements_of<C, kSize>(param_words[j]);
    const Vector<G, kSize> g = elements_of<G, kSize>(grad_words[j]);
    Vector<S, kSize> state[kStates > 0 ? kStates : 1];
    for (int n = 0; n < kStates; ++n) state[n] = elements_of<S, kSize>(state_words[j][n]);
    int64_t segment = find_segment(shard.segments, first_and_last[0], first_and_last[1], i) - 1;
    int64_t from = 0, to = i;
    Rates<C> rates{};
    bool changed = false;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      while (i + k >= to) {  // once for most vectors
        ++segment;
        from = to = INT64_MAX;
        if (segment >= shard.count) break;
        const Segment& at = shard.segments[segment];
        from = static_cast<int64_t>(at.begin), to = static_cast<int64_t>(at.end);
        rates = {s[Rule::kLr] * static_cast<C>(at.lr),
                 s[Rule::kDecay] * static_cast<C>(at.weight_decay)};
      }
      if (i + k < from || k >= count) continue;  // padding
      const C gradient = convert_to<C>(g.v[k]);
      C own[kStates > 0 ? kStates : 1];
      for (int n = 0; n < kStates; ++n) own[n] = convert_to<C>(state[n].v[k]);
      uint32_t noise = 0;
      if constexpr (kStates > 0 && kRounds<S, C>)
        noise = noise_of(__float_as_uint(p.v[k]), __float_as_uint(own[0]),
                         __float_as_uint(s[Rule::kClip] * gradient), key);
      Rule::update(rule, s, rates, gradient, p.v[k], own);
      for (int n = 0; n < kStates; ++n) state[n].v[k] = at_rest<S>(own[n], noise >> (16 * n));
      changed = true;
    }
    if (!changed) continue;
    const bool whole = shard.vectors && count == kSize;
    store<C, kSize>(param + i, p, count, whole);
    for (int n = 0; n < kStates; ++n)
      store<S, kSize>(static_cast<S*>(shard.state[n]) + i, state[n], count, whole);
  }
}

__global__ void count(const double* scalars, int64_t n, const int32_t* found_inf, int64_t* applied,
                      double* out) {
  if (threadIdx.x != 0) return;
  const int64_t steps = *applied + (found_inf && *found_inf != 0 ? 0 : 1);
  *applied = steps;
  for (int64_t i = 0; i < n; ++i) out[i] = scalars[i];
  out[cpu::kBiasCorrection1] = 1.0 - cpu::power(scalars[cpu::kBeta1], steps);
  out[cpu::kBiasCorrection2] = 1.0 - cpu::power(scalars[cpu::kBeta2], steps);
}

template <class C>
__global__ void __launch_bounds__(kThreads) sign_step_of(C* param, const C* grad, C rate,
                                                         int64_t numel, const int32_t* found_inf) {
  if (found_inf && *found_inf != 0) return;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= numel) return;
  if (grad[i] > C(0)) param[i] = param[i] - rate;
  else if (grad[i] < C(0)) param[i] = param[i] + rate;
}

const int32_t* flag(const char* who, const View& found_inf) {
  if (!found_inf.data) return nullptr;
  check<ShapeError>(found_inf.numel() == 1 && found_inf.dtype == kI32, "[", who,
                    "] found_inf is i32[], not ", found_inf.dtype, found_inf.shape);
  return found_inf.as<int32_t>();
}

void check_flat(const char* who, const View& param, const View& v) {
  check<ShapeError>(v.contiguous() && v.numel() == param.numel(), "[", who, "] state of shape ",
                    v.shape, " for ", param.numel(), " parameters; all must be dense");
}

template <class Rule>
void run(const char* who, const Stream& stream, const Rule& rule, const View& param,
         const View& grad, const std::array<View, Rule::kStates>& states, const View& segments,
         const View& scalars, const View& clip_scale, const View& found_inf) {
  check_flat(who, param, param), check_flat(who, param, grad);
  DType at_rest = param.dtype;
  for (const View& state : states) {
    check_flat(who, param, state);
    at_rest = state.dtype;
    check<DTypeError>(
        (at_rest == param.dtype || (at_rest == kBF16 && param.dtype == kF32)) &&
            at_rest == states[0].dtype,
        "[", who, "] state in ", at_rest, " for parameters in ", param.dtype);
  }
  check<DTypeError>(param.dtype == kF32 || param.dtype == kF64, "[", who,
                    "] parameters must be f32 or f64, not ", param.dtype);
  const auto read = [&](const View& v, int count) {
    check<ShapeError>(
        v.numel() == count && v.contiguous() && (v.dtype == kF32 || v.dtype == kF64), "[", who,
        "] wants ", count, " scalars, f32 or f64, got ", v.dtype, v.shape);
    return Scalars{v.data, v.dtype == kF64};
  };
  check<ShapeError>(segments.rank() == 2 && segments.shape[1] == Segment::kColumns &&
                        segments.contiguous() && segments.dtype == kF64,
                    "[", who, "] segments must be f64 [k, 4], got ", segments.dtype,
                    segments.shape);
  Shard<Rule::kStates> shard{};
  shard.param = param.data, shard.grad = grad.data, shard.numel = param.numel();
  shard.segments = segments.as<Segment>(), shard.count = segments.shape[0];
  shard.scalars = read(scalars, Rule::kScalars);
  if (clip_scale.data) shard.clip_scale = read(clip_scale, 1);
  shard.found_inf = flag(who, found_inf);
  for (int k = 0; k < Rule::kStates; ++k) shard.state[k] = states[static_cast<size_t>(k)].data;
  visit_floating(who, grad.dtype, [&]<class G>() {
    const auto enqueue = [&]<class C, class S>() {
      constexpr int kSize = 16 / sizeof(C);
      const auto fits = [](const void* p, size_t alignment) {
        return reinterpret_cast<uintptr_t>(p) % alignment == 0;
      };
      shard.vectors = fits(param.data, 16) && fits(grad.data, alignof(Vector<G, kSize>));
      for (int k = 0; k < Rule::kStates; ++k)
        shard.vectors = shard.vectors && fits(shard.state[k], alignof(Vector<S, kSize>));
      const int64_t elements = kThreads * kVectors * kSize;
      launch(who, stream, {.blocks = blocks_for(shard.numel, elements), .threads = kThreads},
             step<C, G, S, Rule>, rule, shard);
    };
    if (param.dtype == kF64) return enqueue.template operator()<double, double>();
    if constexpr (Rule::kStates > 0)
      if (at_rest == kBF16) return enqueue.template operator()<float, bf16>();
    enqueue.template operator()<float, float>();
  });
}

}  // namespace

void adamw(const Stream& stream, const View& param, const View& grad, const View& m, const View& v,
           const View& segments, const View& scalars, const View& clip_scale,
           const View& found_inf) {
  run("adamw", stream, AdamW{}, param, grad, {m, v}, segments, scalars, clip_scale, found_inf);
}

void count_adamw(const Stream& stream, const View& scalars, const View& found_inf,
                 const View& applied, const View& out) {
  check<ShapeError>(scalars.contiguous() && out.contiguous() && scalars.dtype == kF64 &&
                        out.dtype == kF64 && scalars.numel() >= cpu::kAdamWScalars &&
                        out.numel() == scalars.numel() && applied.numel() == 1 &&
                        applied.dtype == kI64,
                    "[count_adamw] wants scalars f64 [n] twice and i64 [], got ", scalars.dtype,
                    scalars.shape, ", ", out.dtype, out.shape, " and ", applied.dtype,
                    applied.shape);
  launch("count_adamw", stream, {.blocks = 1, .threads = kWarp}, count, scalars.as<double>(),
         scalars.numel(), flag("count_adamw", found_inf), applied.as<int64_t>(),
         out.as<double>());
}

void sgd(const Stream& stream, const View& param, const View& grad, const View& momentum_buffer,
         const View& segments, const View& scalars, bool nesterov, const View& clip_scale,
         const View& found_inf) {
  if (momentum_buffer.rank() == 0)
    run("sgd", stream, Sgd<false>{nesterov}, param, grad, {}, segments, scalars, clip_scale,
        found_inf);
  else
    run("sgd", stream, Sgd<true>{nesterov}, param, grad, {momentum_buffer}, segments, scalars,
        clip_scale, found_inf);
}

void sign_step(const Stream& stream, const View& param, const View& grad, double rate,
               const View& found_inf) {
  check_flat("steer", param, param), check_flat("steer", param, grad);
  check<DTypeError>(param.dtype == grad.dtype && (param.dtype == kF32 || param.dtype == kF64),
                    "[steer] parameters in ", param.dtype, " with gradients in ", grad.dtype);
  const auto enqueue = [&]<class C>() {
    launch("steer", stream, {.blocks = blocks_for(param.numel(), kThreads), .threads = kThreads},
           sign_step_of<C>, param.as<C>(), static_cast<const C*>(grad.as<C>()),
           static_cast<C>(rate), param.numel(), flag("steer", found_inf));
  };
  if (param.dtype == kF64) enqueue.template operator()<double>();
  else enqueue.template operator()<float>();
}

}  // namespace sheaf::kernels::cuda
