#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/vector_math.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

/// out = f(kept, dy) in f64 if either is f64, else in f32.
template <class F>
void map_backward(const char* who, const View& kept, const View& dy, const View& dx, F f) {
  check_shapes(who, dx, kept, dy);
  const DType compute = compute_type(compute_type(kept.dtype, dy.dtype), dx.dtype);
  auto run = [&]<class C>() {
    map_blocks<C>(
        dx,
        [f](C* to, const C* a, const C* d, int64_t n) {
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) to[i] = f(a[i], d[i]);
        },
        kept, dy);
  };
  if (compute == kF64) return run.template operator()<double>();
  if (compute == kF32) return run.template operator()<float>();
  fail<DTypeError>("[", who, "] is not defined for ", kept.dtype);
}

}  // namespace

void gelu_backward(UnaryOp kind, const View& x, const View& dy, const View& dx) {
  if (kind == UnaryOp::gelu_exact) {
    return map_backward("gelu_backward", x, dy, dx, []<class C>(C v, C d) {
      return d * (vm::normal_cdf(v) + v * vm::normal_pdf(v));
    });
  }
  // With s = sigmoid(2u): y = x s, and ds/dx = s (1 - s) 2u'.
  map_backward("gelu_backward", x, dy, dx, []<class C>(C v, C d) {
    const C k = C(1.5957691216057308), cubic = C(0.044715);
    const C s = vm::sigmoid(k * (v + cubic * v * v * v));
    return d * (s + v * s * (C(1) - s) * k * (C(1) + C(3) * cubic * v * v));
  });
}

void silu_backward(const View& x, const View& dy, const View& dx) {
  map_backward("silu_backward", x, dy, dx, []<class C>(C v, C d) {
    const C s = vm::sigmoid(v);
    return d * s * (C(1) + v * (C(1) - s));
  });
}

void relu_backward(const View& x, const View& dy, const View& dx) {
  map_backward("relu_backward", x, dy, dx, []<class C>(C v, C d) { return v > C(0) ? d : C(0); });
}

void tanh_backward(const View& y, const View& dy, const View& dx) {
  map_backward("tanh_backward", y, dy, dx, []<class C>(C v, C d) { return d * (C(1) - v * v); });
}

void sigmoid_backward(const View& y, const View& dy, const View& dx) {
  map_backward("sigmoid_backward", y, dy, dx, []<class C>(C v, C d) { return d * v * (C(1) - v); });
}

void swiglu_backward(const View& gate, const View& up, const View& dy, const View& dgate,
                     const View& dup) {
  check_shapes("swiglu_backward", dgate, gate, up, dy, dup);
  const DType compute =
      compute_type(compute_type(gate.dtype, up.dtype), compute_type(dy.dtype, dgate.dtype));
  auto run = [&]<class C>() {
    map_blocks2<C>(
        dgate, dup,
        [](C* to_gate, C* to_up, const C* g, const C* u, const C* d, int64_t n) {
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) {
            const C gi = g[i], ui = u[i], di = d[i], s = vm::sigmoid(gi);
            to_gate[i] = di * ui * s * (C(1) + gi * (C(1) - s));
            to_up[i] = di * gi * s;
          }
        },
        gate, up, dy);
  };
  if (compute == kF64) return run.template operator()<double>();
  if (compute == kF32) return run.template operator()<float>();
  fail<DTypeError>("[swiglu_backward] is not defined for ", gate.dtype);
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
