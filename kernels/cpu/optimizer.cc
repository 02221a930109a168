#include "sheaf/kernels/optimizer.h"

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

void check_flat(const char* who, const View& param, const View& v, bool same_dtype) {
  check<ShapeError>(v.contiguous() && v.numel() == param.numel(), "[", who, "] state of shape ",
                    v.shape, " for ", param.numel(), " parameters; all must be dense");
  check<DTypeError>(!same_dtype || v.dtype == param.dtype, "[", who, "] state in ", v.dtype,
                    " for parameters in ", param.dtype);
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

/// All scalars; `clip_scale`, if given, in the place of element `clip`.
template <class C>
void read_scalars(const char* who, const View& scalars, C* out, int count, const View& clip_scale,
                  int clip) {
  read_scalars(who, scalars, out, count);
  if (clip_scale.data) read_scalars(who, clip_scale, out + clip, 1);
}

/// Of an i32 scalar, or View{}.
bool is_set(const char* who, const View& found_inf) {
  if (!found_inf.data) return false;
  check<ShapeError>(found_inf.numel() == 1 && found_inf.dtype == kI32, "[", who,
                    "] found_inf is i32[], not ", found_inf.dtype, found_inf.shape);
  return *found_inf.as<int32_t>() != 0;
}

/// Calls update(i, n, decay) for all lanes of all segments, on all threads.
template <class F>
void for_segments(const char* who, int64_t numel, const View& segments, F&& update) {
  check<ShapeError>(segments.rank() == 2 && segments.shape[1] == 3 && segments.contiguous() &&
                        segments.dtype == kI64,
                    "[", who, "] segments must be i64 [k, 3], got ", segments.dtype,
                    segments.shape);
  const int64_t* table = segments.as<int64_t>();
  for (int64_t s = 0; s < segments.shape[0]; ++s)
    check<ShapeError>(
        table[3 * s] >= 0 && table[3 * s] <= table[3 * s + 1] && table[3 * s + 1] <= numel, "[",
        who, "] segment ", table[3 * s], " to ", table[3 * s + 1], " of ", numel, " elements");
  parallel_for((numel + kLanes - 1) / kLanes, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t s = 0; s < segments.shape[0]; ++s) {
      const int64_t first = std::max(begin * kLanes, table[3 * s]),
                    last = std::min(end * kLanes, table[3 * s + 1]);
      if (first < last)
        for_lanes(last - first,
                  [&](int64_t i, auto n) { update(first + i, n, table[3 * s + 2] != 0); });
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

}  // namespace

void adamw(const View& param, const View& grad, const View& m, const View& v, const View& segments,
           const View& scalars, const View& clip_scale, const View& found_inf) {
  check_flat("adamw", param, param, true), check_flat("adamw", param, grad, false);
  check_flat("adamw", param, m, true), check_flat("adamw", param, v, true);
  if (is_set("adamw", found_inf)) return;
  visit_param("adamw", param.dtype, [&]<class C>() {
    visit_floating("adamw", grad.dtype, [&]<class G>() {
      using L = Lanes<C>;
      C s[kAdamWScalars];
      read_scalars("adamw", scalars, s, kAdamWScalars, clip_scale, kClipScale);
      const L lr(s[kLearningRate]), beta1(s[kBeta1]), beta2(s[kBeta2]), rest1(C(1) - s[kBeta1]),
          rest2(C(1) - s[kBeta2]);
      const L epsilon(s[kEpsilon]), decay(s[kLearningRate] * s[kWeightDecay]), clip(s[kClipScale]);
      const L correction1(s[kBiasCorrection1]), correction2(s[kBiasCorrection2]);
      for_segments("adamw", param.numel(), segments, [&](int64_t i, auto n, bool decays) {
        const L g = clip * load_gradient<C>(grad.as<G>(), i, n);
        const L mean = beta1 * load_lanes(m.as<C>() + i, n) + rest1 * g;
        const L square = beta2 * load_lanes(v.as<C>() + i, n) + (rest2 * g) * g;
        L p = load_lanes(param.as<C>() + i, n);
        if (decays) p = p - decay * p;
        p = p - lr * ((mean / correction1) / (sqrt(square / correction2) + epsilon));
        store_lanes(m.as<C>() + i, mean, n), store_lanes(v.as<C>() + i, square, n),
            store_lanes(param.as<C>() + i, p, n);
      });
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
  check_flat("sgd", param, param, true), check_flat("sgd", param, grad, false);
  if (has_buffer) check_flat("sgd", param, momentum_buffer, true);
  if (is_set("sgd", found_inf)) return;
  visit_param("sgd", param.dtype, [&]<class C>() {
    visit_floating("sgd", grad.dtype, [&]<class G>() {
      using L = Lanes<C>;
      C s[kSgdScalars];
      read_scalars("sgd", scalars, s, kSgdScalars, clip_scale, kSgdClipScale);
      const L lr(s[kSgdLearningRate]), momentum(s[kSgdMomentum]), decay(s[kSgdWeightDecay]),
          clip(s[kSgdClipScale]);
      for_segments("sgd", param.numel(), segments, [&](int64_t i, auto n, bool decays) {
        const L p = load_lanes(param.as<C>() + i, n);
        L g = clip * load_gradient<C>(grad.as<G>(), i, n);
        if (decays) g = g + decay * p;
        if (has_buffer) {
          const L b = momentum * load_lanes(momentum_buffer.as<C>() + i, n) + g;
          store_lanes(momentum_buffer.as<C>() + i, b, n);
          g = nesterov ? g + momentum * b : b;
        }
        store_lanes(param.as<C>() + i, p - lr * g, n);
      });
    });
  });
}

}  // namespace sheaf::kernels::cpu
