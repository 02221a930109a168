#include "sheaf/kernels/optimizer.h"

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/read_ahead.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

void check_flat(const char* who, const View& param, const View& v) {
  check<ShapeError>(v.contiguous() && v.numel() == param.numel(), "[", who, "] state of shape ",
                    v.shape, " for ", param.numel(), " parameters; all must be dense");
}
void check_state(const char* who, const View& param, const View& state) {
  check_flat(who, param, state);
  check<DTypeError>(state.dtype == param.dtype || (state.dtype == kBF16 && param.dtype == kF32),
                    "[", who, "] state in ", state.dtype, " for parameters in ", param.dtype);
}

template <class C>
void read_scalars(const char* who, const View& scalars, C* out, int count) {
  check<ShapeError>(scalars.numel() == count && scalars.contiguous(), "[", who, "] wants ", count,
                    " scalars, got ", scalars.shape);
  visit_floating(who, scalars.dtype, [&]<class S>() {
    for (int i = 0; i < count; ++i)
      out[i] = static_cast<C>(static_cast<ComputeType<S>>(scalars.as<S>()[i]));
  });
}

/// All scalars; `clip_scale`, if given, replaces element `clip`.
template <class C>
void read_scalars(const char* who, const View& scalars, C* out, int count, const View& clip_scale,
                  int clip) {
  read_scalars(who, scalars, out, count);
  if (clip_scale.data) read_scalars(who, clip_scale, out + clip, 1);
}

/// Whether an i32 scalar is set; not if it is View{}.
bool is_set(const char* who, const View& found_inf) {
  if (!found_inf.data) return false;
  check<ShapeError>(found_inf.numel() == 1 && found_inf.dtype == kI32, "[", who,
                    "] found_inf is i32[], not ", found_inf.dtype, found_inf.shape);
  return *found_inf.as<int32_t>() != 0;
}

/// Calls update(segment, first, last) for the elements of all segments, on all threads.
template <class F>
void for_segments(const char* who, int64_t numel, const View& segments, F&& update) {
  check<ShapeError>(segments.rank() == 2 && segments.shape[1] == Segment::kColumns &&
                        segments.contiguous() && segments.dtype == kF64,
                    "[", who, "] segments must be f64 [k, 4], got ", segments.dtype,
                    segments.shape);
  const std::span table(segments.as<Segment>(), static_cast<size_t>(segments.shape[0]));
  for (const Segment& s : table)
    check<ShapeError>(s.begin >= 0 && s.begin <= s.end && s.end <= static_cast<double>(numel), "[",
                      who, "] segment ", s.begin, " to ", s.end, " of ", numel, " elements");
  parallel_for((numel + kLanes - 1) / kLanes, 4096, [&](int64_t begin, int64_t end) {
    for (const Segment& s : table) {
      const int64_t first = std::max(begin * kLanes, static_cast<int64_t>(s.begin)),
                    last = std::min(end * kLanes, static_cast<int64_t>(s.end));
      if (first < last) update(s, first, last);
    }
  });
}

template <class F>
void visit_param(const char* who, DType d, F&& f) {
  if (d == kF32) return f.template operator()<float>();
  if (d == kF64) return f.template operator()<double>();
  fail<DTypeError>("[", who, "] parameters must be f32 or f64, not ", d);
}

/// Gradients of any floating type, in the parameters' type.
template <class C, class G, class N>
SHEAF_INLINE Lanes<C> load_gradient(const G* grad, int64_t i, N n) {
  if constexpr (std::is_same_v<ComputeType<G>, C>) {
    return load_lanes(grad + i, n);
  } else {
    Lanes<C> out(C(0));
    C buffer[kLanes] = {};
    for (int j = 0; j < n; ++j)
      buffer[j] = static_cast<C>(static_cast<ComputeType<G>>(grad[i + j]));
    return out + Lanes<C>::load(buffer);
  }
}

/// Calls f with the type of state for parameters of type C.
template <class C, class F>
void visit_state(DType d, F&& f) {
  if constexpr (std::is_same_v<C, float>)
    if (d == kBF16) return f.template operator()<bf16>();
  f.template operator()<C>();
}

// rounded_by_chance() of sixteen elements.

SHEAF_INLINE __m256i noise_mix(__m256i x) {
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)),
                         _mm256_set1_epi32(0x7feb352d));
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                         _mm256_set1_epi32(static_cast<int>(0x846ca68bu)));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}
SHEAF_INLINE __m256i noise_of(__m256 param, __m256 state, __m256 grad, __m256i key) {
  const __m256i sum = _mm256_add_epi32(_mm256_xor_si256(_mm256_castps_si256(param), key),
                                       _mm256_castps_si256(grad));
  return noise_mix(_mm256_xor_si256(sum, _mm256_castps_si256(state)));
}
/// The bits of bf16 in 32-bit lanes; `noise` has only its lower 16 bits. NaN from arithmetic is quiet, so its upper
/// half is NaN, too.
SHEAF_INLINE __m256i rounded_by_chance(__m256 x, __m256i noise) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000), bits = _mm256_castps_si256(x);
  const __m256i special = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent);
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_andnot_si256(special, noise)), 16);
}

/// Noise for sixteen elements; none if state is stored in its compute type.
template <class S>
struct Noise {
  template <class C>
  SHEAF_INLINE Noise(const Lanes<C>&, const Lanes<C>&, const Lanes<C>&, C) {}
  template <int kState, class C, class N>
  SHEAF_INLINE void store(S* to, const Lanes<C>& x, N n) const {
    store_lanes(to, x, n);
  }
};
template <>
struct Noise<bf16> {
  __m256i low, high;
  SHEAF_INLINE Noise(const Lanes<float>& param, const Lanes<float>& state,
                     const Lanes<float>& grad, float step) {
    const __m256i key = _mm256_set1_epi32(static_cast<int>(noise_key(step)));
    low = noise_of(param.low(), state.low(), grad.low(), key);
    high = noise_of(param.high(), state.high(), grad.high(), key);
  }
  template <int kState>
  static SHEAF_INLINE __m256i half(__m256i x) {
    return kState == 0 ? _mm256_and_si256(x, _mm256_set1_epi32(0xffff)) : _mm256_srli_epi32(x, 16);
  }
  template <int kState, class N>
  SHEAF_INLINE void store(bf16* to, const Lanes<float>& x, N n) const {
    const __m256i packed =
        _mm256_packus_epi32(rounded_by_chance(x.low(), half<kState>(low)),
                            rounded_by_chance(x.high(), half<kState>(high)));
    const __m256i in_order = _mm256_permute4x64_epi64(packed, 0xd8);
    if constexpr (std::is_same_v<N, int>) {
      bf16 buffer[kLanes];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(buffer), in_order);
      for (int i = 0; i < n; ++i) to[i] = buffer[i];
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), in_order);
    }
  }
};

}  // namespace

void adamw(const View& param, const View& grad, const View& m, const View& v, const View& segments,
           const View& scalars, const View& clip_scale, const View& found_inf) {
  check_flat("adamw", param, param), check_flat("adamw", param, grad);
  check_state("adamw", param, m), check_state("adamw", param, v);
  check<DTypeError>(m.dtype == v.dtype, "[adamw] state in ", m.dtype, " and ", v.dtype);
  if (is_set("adamw", found_inf)) return;
  const auto step = [&]<class C, class G, class S>() {
    using L = Lanes<C>;
    C s[kAdamWScalars];
    read_scalars("adamw", scalars, s, kAdamWScalars, clip_scale, kClipScale);
    const L beta1(s[kBeta1]), beta2(s[kBeta2]), rest1(C(1) - s[kBeta1]), rest2(C(1) - s[kBeta2]);
    const L epsilon(s[kEpsilon]), clip(s[kClipScale]);
    const L correction1(s[kBiasCorrection1]), correction2(s[kBiasCorrection2]);
    for_segments("adamw", param.numel(), segments, [&](const Segment& at, int64_t first,
                                                       int64_t last) {
      const C rate = s[kLearningRate] * static_cast<C>(at.lr),
              decay_rate = s[kWeightDecay] * static_cast<C>(at.weight_decay);
      const L lr(rate), decay(rate * decay_rate);
      for_lanes(last - first, [&](int64_t lane, auto n) {
        const int64_t i = first + lane;
        read_ahead(param.as<C>() + i), read_ahead(grad.as<G>() + i), read_ahead(m.as<S>() + i), read_ahead(v.as<S>() + i);
        const L g = clip * load_gradient<C>(grad.as<G>(), i, n);
        const L before = load_lanes(m.as<S>() + i, n), mean = beta1 * before + rest1 * g;
        const L square = beta2 * load_lanes(v.as<S>() + i, n) + (rest2 * g) * g;
        L p = load_lanes(param.as<C>() + i, n);
        const Noise<S> noise(p, before, g, s[kStep]);
        if (decay_rate != 0) p = p - decay * p;
        p = p - lr * ((mean / correction1) / (sqrt(square / correction2) + epsilon));
        noise.template store<0>(m.as<S>() + i, mean, n);
        noise.template store<1>(v.as<S>() + i, square, n);
        store_lanes(param.as<C>() + i, p, n);
      });
    });
  };
  visit_param("adamw", param.dtype, [&]<class C>() {
    visit_floating("adamw", grad.dtype, [&]<class G>() {
      visit_state<C>(m.dtype, [&]<class S>() { step.template operator()<C, G, S>(); });
    });
  });
}

void count_adamw(const View& scalars, const View& found_inf, const View& applied, const View& out) {
  check<ShapeError>(scalars.contiguous() && out.contiguous() && scalars.dtype == kF64 &&
                        out.dtype == kF64 && scalars.numel() >= kAdamWScalars &&
                        out.numel() == scalars.numel() && applied.numel() == 1 &&
                        applied.dtype == kI64,
                    "[count_adamw] wants scalars f64 [n] twice and i64 [], got ", scalars.dtype,
                    scalars.shape, ", ", out.dtype, out.shape, " and ", applied.dtype,
                    applied.shape);
  int64_t& count = *applied.as<int64_t>();
  if (!is_set("count_adamw", found_inf)) ++count;
  double* s = out.as<double>();
  std::copy_n(scalars.as<double>(), scalars.numel(), s);
  s[kBiasCorrection1] = 1.0 - power(s[kBeta1], count);
  s[kBiasCorrection2] = 1.0 - power(s[kBeta2], count);
}

void sgd(const View& param, const View& grad, const View& momentum_buffer, const View& segments,
         const View& scalars, bool nesterov, const View& clip_scale, const View& found_inf) {
  const bool has_buffer = momentum_buffer.rank() != 0;
  check_flat("sgd", param, param), check_flat("sgd", param, grad);
  if (has_buffer) check_state("sgd", param, momentum_buffer);
  if (is_set("sgd", found_inf)) return;
  const auto step = [&]<class C, class G, class S>() {
    using L = Lanes<C>;
    C s[kSgdScalars];
    read_scalars("sgd", scalars, s, kSgdScalars, clip_scale, kSgdClipScale);
    const L momentum(s[kSgdMomentum]), clip(s[kSgdClipScale]);
    for_segments("sgd", param.numel(), segments, [&](const Segment& at, int64_t first,
                                                     int64_t last) {
      const C decay_rate = s[kSgdWeightDecay] * static_cast<C>(at.weight_decay);
      const L lr(s[kSgdLearningRate] * static_cast<C>(at.lr)), decay(decay_rate);
      for_lanes(last - first, [&](int64_t lane, auto n) {
        const int64_t i = first + lane;
        read_ahead(param.as<C>() + i), read_ahead(grad.as<G>() + i);
        if (has_buffer) read_ahead(momentum_buffer.as<S>() + i);
        const L p = load_lanes(param.as<C>() + i, n);
        const L clipped = clip * load_gradient<C>(grad.as<G>(), i, n);
        L g = clipped;
        if (decay_rate != 0) g = g + decay * p;
        if (has_buffer) {
          const L before = load_lanes(momentum_buffer.as<S>() + i, n), b = momentum * before + g;
          const Noise<S> noise(p, before, clipped, s[kSgdStep]);
          noise.template store<0>(momentum_buffer.as<S>() + i, b, n);
          g = nesterov ? g + momentum * b : b;
        }
        store_lanes(param.as<C>() + i, p - lr * g, n);
      });
    });
  };
  visit_param("sgd", param.dtype, [&]<class C>() {
    visit_floating("sgd", grad.dtype, [&]<class G>() {
      visit_state<C>(has_buffer ? momentum_buffer.dtype : param.dtype,
                     [&]<class S>() { step.template operator()<C, G, S>(); });
    });
  });
}

void sign_step(const View& param, const View& grad, double rate, const View& found_inf) {
  check_flat("steer", param, param), check_flat("steer", param, grad);
  check<DTypeError>(param.dtype == grad.dtype, "[steer] parameters in ", param.dtype,
                    " with gradients in ", grad.dtype);
  if (is_set("steer", found_inf)) return;
  visit_param("steer", param.dtype, [&]<class C>() {
    C* const p = param.as<C>();
    const C* const g = grad.as<C>();
    const C by = static_cast<C>(rate);
    for (int64_t i = 0; i < param.numel(); ++i) {  // few
      if (g[i] > C(0)) p[i] -= by;
      else if (g[i] < C(0)) p[i] += by;
    }
  });
}

}  // namespace sheaf::kernels::cpu
