#include <cmath>

#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/elementwise_loops.h"
#include "sheaf/kernels/cpu/vector_math.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

template <class C, class F>
void loop(C* to, const C* kept, const C* dy, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = F{}(kept[i], dy[i]);
}

}  // namespace

template <class C>
Loop2<C> backward_loop(BackwardOp op) {
  const auto use = [](auto f) -> Loop2<C> { return loop<C, decltype(f)>; };
  switch (op) {
    case BackwardOp::gelu_exact:
      return use([](C v, C d) { return vm::nan_or(d, d * (vm::normal_cdf(v) + v * vm::normal_pdf(v))); });
    case BackwardOp::gelu_tanh:  // with s = sigmoid(2u): y = x s, and ds/dx = s (1 - s) 2u'
      return use([](C v, C d) {
        const C k = C(1.5957691216057308), cubic = C(0.044715);
        const C s = vm::sigmoid(k * (v + cubic * v * v * v));
        return vm::nan_or(d, d * (s + v * s * (C(1) - s) * k * (C(1) + C(3) * cubic * v * v)));
      });
    case BackwardOp::silu:
      return use([](C v, C d) {
        const C s = vm::sigmoid(v);
        return vm::nan_or(d, d * s * (C(1) + v * (C(1) - s)));
      });
    case BackwardOp::relu:
      return use([](C v, C d) { return v > C(0) ? d : C(0); });
    case BackwardOp::tanh:
      return use([](C y, C d) { return d * (C(1) - y * y); });
    case BackwardOp::sigmoid:
      return use([](C y, C d) { return d * y * (C(1) - y); });
  }
  return nullptr;
}
template Loop2<float> backward_loop<float>(BackwardOp);
template Loop2<double> backward_loop<double>(BackwardOp);

void activation_backward(BackwardOp op, const View& kept, const View& dy, const View& dx) {
  check_shapes("activation_backward", dx, kept, dy);
  const DType compute = compute_type(compute_type(kept.dtype, dy.dtype), dx.dtype);
  if (compute == kF64) return map_blocks<double>(dx, backward_loop<double>(op), kept, dy);
  if (compute == kF32) return map_blocks<float>(dx, backward_loop<float>(op), kept, dy);
  fail<DTypeError>("[activation_backward] is not defined for ", kept.dtype);
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
            const C at_up = vm::nan_or(di, di * ui);
            to_gate[i] = vm::nan_or(at_up, at_up * s * (C(1) + gi * (C(1) - s)));
            to_up[i] = vm::nan_or(di, di * gi * s);
          }
        },
        gate, up, dy);
  };
  if (compute == kF64) return run.template operator()<double>();
  if (compute == kF32) return run.template operator()<float>();
  fail<DTypeError>("[swiglu_backward] is not defined for ", gate.dtype);
}

void clamped_swiglu_backward(const View& gate, const View& up, const View& dy, double alpha, double limit, const View& dgate,
                             const View& dup) {
  check_shapes("clamped_swiglu_backward", dgate, gate, up, dy, dup);
  const DType compute =
      compute_type(compute_type(gate.dtype, up.dtype), compute_type(dy.dtype, dgate.dtype));
  auto run = [&]<class C>() {
    const C slope = static_cast<C>(alpha), most = static_cast<C>(limit);
    map_blocks2<C>(
        dgate, dup,
        [=](C* to_gate, C* to_up, const C* g, const C* u, const C* d, int64_t n) {
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) {
            const C gate_i = g[i], up_i = u[i], di = d[i];
            const C gi = gate_i > most ? most : gate_i, low = up_i < -most ? -most : up_i, ui = low > most ? most : low;
            const C xi = slope * gi, s = vm::sigmoid(xi);
            const C at_up = vm::nan_or(di, di * (ui + C(1)));
            const C by_gate = vm::nan_or(at_up, at_up * s * (C(1) + xi * (C(1) - s))), by_up = vm::nan_or(di, di * gi * s);
            to_gate[i] = gate_i <= most ? by_gate : C(0);
            to_up[i] = std::abs(up_i) <= most ? by_up : C(0);
          }
        },
        gate, up, dy);
  };
  if (compute == kF64) return run.template operator()<double>();
  if (compute == kF32) return run.template operator()<float>();
  fail<DTypeError>("[clamped_swiglu_backward] is not defined for ", gate.dtype);
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
