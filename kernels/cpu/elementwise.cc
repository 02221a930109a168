#include "sheaf/kernels/elementwise.h"

#include <cmath>
#include <limits>

#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/elementwise_loops.h"
#include "sheaf/kernels/cpu/vector_math.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

// The loops that g++ vectorises. ivdep: an output is disjoint from an input, or the same memory, element for element. F has no
// members: its type determines the loop.
template <class C, class Out, class F>
void loop1(Out* to, const C* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = F{}(x[i]);
}
template <class C, class Out, class F>
void loop2(Out* to, const C* x, const C* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = F{}(x[i], y[i]);
}

template <class C, class Out = C>
void unary_any(UnaryOp op, const View& x, const View& out) {
  const auto loop = unary_loop<C, Out>(op);
  if (!loop) fail<DTypeError>("[unary] this op is not defined for ", x.dtype);
  map_blocks<C, Out>(out, loop, x);
}

template <class C, class Out = C>
void binary_any(BinaryOp op, const View& a, const View& b, const View& out) {
  const auto loop = binary_loop<C, Out>(op);
  if (!loop)
    fail<DTypeError>("[binary] this op is not defined for ", a.dtype,
                     ": cast to a floating type first");
  map_blocks<C, Out>(out, loop, a, b);
}
// Bools are stored from bytes.
template <class C>
void binary_or_predicate(BinaryOp op, const View& a, const View& b, const View& out) {
  is_predicate(op) ? binary_any<C, bool>(op, a, b, out) : binary_any<C>(op, a, b, out);
}

}  // namespace

template <class C, class Out>
Loop1<C, Out> unary_loop(UnaryOp op) {
  const auto use = [](auto f) -> Loop1<C, Out> { return loop1<C, Out, decltype(f)>; };
  if (op == UnaryOp::logical_not) return use([](C v) { return v == C(0); });
  // x - x is 0 exactly where x is finite.
  if (op == UnaryOp::isfinite) return use([](C v) { return v - v == C(0); });
  if constexpr (std::is_same_v<C, Out>) {
    switch (op) {
      case UnaryOp::neg:
        return use([](C v) { return -v; });
      case UnaryOp::abs:
        return use([](C v) { return std::abs(v); });
      case UnaryOp::square:
        return use([](C v) { return v * v; });
      case UnaryOp::sign:
        return use([](C v) { return v > C(0) ? C(1) : v < C(0) ? C(-1) : v; });
      case UnaryOp::relu:
        return use([](C v) { return v < C(0) ? C(0) : v; });
      default:
        break;
    }
    if constexpr (std::is_floating_point_v<C>) {
      switch (op) {
        case UnaryOp::exp:
          return use([](C v) { return vm::exp(v); });
        case UnaryOp::log:
          return use([](C v) { return vm::log(v); });
        case UnaryOp::sqrt:
          return use([](C v) { return std::sqrt(v); });
        case UnaryOp::rsqrt:
          return use([](C v) { return C(1) / std::sqrt(v); });
        case UnaryOp::reciprocal:
          return use([](C v) { return C(1) / v; });
        case UnaryOp::tanh:
          return use([](C v) { return vm::tanh(v); });
        case UnaryOp::sigmoid:
          return use([](C v) { return vm::sigmoid(v); });
        case UnaryOp::silu:
          return use([](C v) { return v * vm::sigmoid(v); });
        case UnaryOp::gelu_exact:
          return use([](C v) { return v * vm::normal_cdf(v); });
        // (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
        case UnaryOp::gelu_tanh:
          return use([](C v) {
            return v * vm::sigmoid(C(1.5957691216057308) * (v + C(0.044715) * v * v * v));
          });
        case UnaryOp::sin:
          return use([](C v) { return static_cast<C>(std::sin(static_cast<double>(v))); });
        case UnaryOp::cos:
          return use([](C v) { return static_cast<C>(std::cos(static_cast<double>(v))); });
        case UnaryOp::softplus:
          return use([](C v) {
            return vm::nan_or(v, (v < C(0) ? C(0) : v) + vm::log1p(vm::exp(-std::abs(v))));
          });
        case UnaryOp::floor:
          return use([](C v) { return std::floor(v); });
        case UnaryOp::round:
          return use([](C v) { return std::nearbyint(v); });
        case UnaryOp::log1p:
          return use([](C v) { return vm::log1p(v); });
        case UnaryOp::expm1:
          return use([](C v) { return vm::expm1(v); });
        case UnaryOp::erf:
          return use([](C v) { return vm::erf(v); });
        default:
          break;
      }
    }
  }
  return nullptr;
}

template <class C, class Out>
Loop2<C, Out> binary_loop(BinaryOp op) {
  const auto use = [](auto f) -> Loop2<C, Out> { return loop2<C, Out, decltype(f)>; };
  switch (op) {
    case BinaryOp::eq:
      return use([](C x, C y) { return x == y; });
    case BinaryOp::ne:
      return use([](C x, C y) { return x != y; });
    case BinaryOp::lt:
      return use([](C x, C y) { return x < y; });
    case BinaryOp::le:
      return use([](C x, C y) { return x <= y; });
    case BinaryOp::gt:
      return use([](C x, C y) { return x > y; });
    case BinaryOp::ge:
      return use([](C x, C y) { return x >= y; });
    case BinaryOp::logical_and:
      return use([](C x, C y) { return x != C(0) && y != C(0); });
    case BinaryOp::logical_or:
      return use([](C x, C y) { return x != C(0) || y != C(0); });
    default:
      break;
  }
  if constexpr (std::is_same_v<C, Out>) {
    switch (op) {
      case BinaryOp::add:
        return use([](C x, C y) { return x + y; });
      case BinaryOp::sub:
        return use([](C x, C y) { return x - y; });
      case BinaryOp::mul:
        return use([](C x, C y) { return x * y; });
      case BinaryOp::minimum:
        return use([](C x, C y) { return x < y || x != x ? x : y; });
      case BinaryOp::maximum:
        return use([](C x, C y) { return x > y || x != x ? x : y; });
      default:
        break;
    }
    if constexpr (std::is_floating_point_v<C>) {
      if (op == BinaryOp::div) return use([](C x, C y) { return x / y; });
      if (op == BinaryOp::pow)
        return use([](C x, C y) {
          return static_cast<C>(std::pow(static_cast<double>(x), static_cast<double>(y)));
        });
    }
  }
  return nullptr;
}

template <class C>
void swiglu_loop(C* to, const C* gate, const C* up, int64_t n) {
  const auto f = [](C g, C u) {
    const C s = g * vm::sigmoid(g);
    return vm::nan_or(s, s * u);
  };
  loop2<C, C, decltype(f)>(to, gate, up, n);
}

template <class C>
void shifted_swiglu_loop(C* to, const C* gate, const C* up, C alpha, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C s = gate[i] * vm::sigmoid(alpha * gate[i]);
    to[i] = vm::nan_or(s, s * (up[i] + C(1)));
  }
}

template <class C>
void where_loop(C* to, const C* cond, const C* x, const C* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = cond[i] != C(0) ? x[i] : y[i];
}

template <class C>
void clamp_loop(C* to, const C* x, C low, C high, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C v = x[i] < low ? low : x[i];
    to[i] = v > high ? high : v;
  }
}

#define SHEAF_LOOPS(C)                             \
  template Loop1<C> unary_loop<C, C>(UnaryOp);     \
  template Loop2<C> binary_loop<C, C>(BinaryOp);   \
  template void swiglu_loop(C*, const C*, const C*, int64_t);          \
  template void shifted_swiglu_loop(C*, const C*, const C*, C, int64_t); \
  template void where_loop(C*, const C*, const C*, const C*, int64_t); \
  template void clamp_loop(C*, const C*, C, C, int64_t);
SHEAF_LOOPS(float)
SHEAF_LOOPS(double)
#undef SHEAF_LOOPS

void unary(UnaryOp op, const View& x, const View& out) {
  check_shapes("unary", out, x);
  const DType compute = is_predicate(op) ? compute_type(x.dtype) : compute_type(x.dtype, out.dtype);
  visit_compute(compute, [&]<class C>() {
    is_predicate(op) ? unary_any<C, bool>(op, x, out) : unary_any<C>(op, x, out);
  });
}

void binary(BinaryOp op, const View& a, const View& b, const View& out) {
  check_shapes("binary", out, a, b);
  DType compute = compute_type(a.dtype, b.dtype);
  if (!is_predicate(op)) compute = compute_type(compute, out.dtype);
  visit_compute(compute, [&]<class C>() { binary_or_predicate<C>(op, a, b, out); });
}

void binary_scalar(BinaryOp op, const View& a, double scalar, bool scalar_left, const View& out) {
  // x^2 is common and exact this way too: both round the exact square once.
  if (op == BinaryOp::pow && scalar == 2.0 && !scalar_left) return unary(UnaryOp::square, a, out);
  check_shapes("binary_scalar", out, a);
  const DType compute = is_predicate(op) ? compute_type(a.dtype) : compute_type(a.dtype, out.dtype);
  visit_compute(compute, [&]<class C>() {
    C value = static_cast<C>(scalar);
    const View s{&value, dtype_of<C>, out.shape, Shape::filled(out.rank(), 0)};
    scalar_left ? binary_or_predicate<C>(op, s, a, out) : binary_or_predicate<C>(op, a, s, out);
  });
}

void where(const View& cond, const View& a, const View& b, const View& out) {
  check_shapes("where", out, cond, a, b);
  visit_compute(compute_type(compute_type(a.dtype, b.dtype), out.dtype), [&]<class C>() {
    map_blocks<C>(out, where_loop<C>, cond, a, b);
  });
}

void where_scalar(const View& cond, const View& x, double scalar, bool scalar_first,
                  const View& out) {
  visit_compute(compute_type(x.dtype, out.dtype), [&]<class C>() {
    C value = static_cast<C>(scalar);
    const View s{&value, dtype_of<C>, out.shape, Shape::filled(out.rank(), 0)};
    scalar_first ? where(cond, s, x, out) : where(cond, x, s, out);
  });
}

void clamp(const View& x, double lo, double hi, const View& out) {
  check_shapes("clamp", out, x);
  visit_compute(compute_type(x.dtype, out.dtype), [&]<class C>() {
    // Integers: a bound beyond the type's range has no effect; a fractional one is rounded inwards.
    auto bound = [](double v) {
      if constexpr (std::is_same_v<C, int64_t>) {
        return v <= -0x1p63 ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : static_cast<int64_t>(v);
      } else {
        return static_cast<C>(v);
      }
    };
    const bool integral = std::is_same_v<C, int64_t>;
    const C low = bound(integral ? std::ceil(lo) : lo),
            high = bound(integral ? std::floor(hi) : hi);
    map_blocks<C>(
        out, [=](C* to, const C* v, int64_t n) { clamp_loop(to, v, low, high, n); }, x);
  });
}

void swiglu(const View& gate, const View& up, const View& out) {
  check_shapes("swiglu", out, gate, up);
  const DType compute = compute_type(compute_type(gate.dtype, up.dtype), out.dtype);
  if (compute == kI64) fail<DTypeError>("[swiglu] is not defined for ", out.dtype);
  auto run = [&]<class C>() { map_blocks<C>(out, swiglu_loop<C>, gate, up); };
  compute == kF64 ? run.operator()<double>() : run.operator()<float>();
}

void clamped_swiglu(const View& gate, const View& up, double alpha, double limit, const View& out) {
  check_shapes("clamped_swiglu", out, gate, up);
  const DType compute = compute_type(compute_type(gate.dtype, up.dtype), out.dtype);
  if (compute == kI64) fail<DTypeError>("[clamped_swiglu] is not defined for ", out.dtype);
  auto run = [&]<class C>() {
    const C slope = static_cast<C>(alpha), most = static_cast<C>(limit);
    // The loops of the same steps as when it is fused.
    const auto loop = [=](C* to, const C* g, const C* u, int64_t n) {
      C held[kBlock];  // `to` may be `u`
      clamp_loop(held, u, -most, most, n);
      clamp_loop(to, g, -std::numeric_limits<C>::infinity(), most, n);
      shifted_swiglu_loop(to, to, held, slope, n);
    };
    map_blocks<C>(out, loop, gate, up);
  };
  compute == kF64 ? run.operator()<double>() : run.operator()<float>();
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
