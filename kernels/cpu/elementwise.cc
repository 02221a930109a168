#include "sheaf/kernels/elementwise.h"

#include <cmath>

#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/vector_math.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

// The loops that g++ vectorises. ivdep: an output is disjoint from an input, or the same element
// for element.
template <class C, class Out = C, class F>
void map1(const View& x, const View& out, F f) {
  map_blocks<C, Out>(
      out,
      [f](Out* to, const C* a, int64_t n) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) to[i] = f(a[i]);
      },
      x);
}
template <class C, class Out = C, class F>
void map2(const View& x, const View& y, const View& out, F f) {
  map_blocks<C, Out>(
      out,
      [f](Out* to, const C* a, const C* b, int64_t n) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) to[i] = f(a[i], b[i]);
      },
      x, y);
}

template <class C>
void unary_any(UnaryOp op, const View& x, const View& out) {
  switch (op) {
    case UnaryOp::neg:
      return map1<C>(x, out, [](C v) { return -v; });
    case UnaryOp::abs:
      return map1<C>(x, out, [](C v) { return std::abs(v); });
    case UnaryOp::square:
      return map1<C>(x, out, [](C v) { return v * v; });
    case UnaryOp::sign:
      return map1<C>(x, out, [](C v) { return v > C(0) ? C(1) : v < C(0) ? C(-1) : v; });
    case UnaryOp::relu:
      return map1<C>(x, out, [](C v) { return v < C(0) ? C(0) : v; });
    case UnaryOp::logical_not:
      return map1<C, bool>(x, out, [](C v) { return v == C(0); });
    // x - x is 0 exactly where x is finite.
    case UnaryOp::isfinite:
      return map1<C, bool>(x, out, [](C v) { return v - v == C(0); });
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    switch (op) {
      case UnaryOp::exp:
        return map1<C>(x, out, [](C v) { return vm::exp(v); });
      case UnaryOp::log:
        return map1<C>(x, out, [](C v) { return vm::log(v); });
      case UnaryOp::sqrt:
        return map1<C>(x, out, [](C v) { return std::sqrt(v); });
      case UnaryOp::rsqrt:
        return map1<C>(x, out, [](C v) { return C(1) / std::sqrt(v); });
      case UnaryOp::reciprocal:
        return map1<C>(x, out, [](C v) { return C(1) / v; });
      case UnaryOp::tanh:
        return map1<C>(x, out, [](C v) { return vm::tanh(v); });
      case UnaryOp::sigmoid:
        return map1<C>(x, out, [](C v) { return vm::sigmoid(v); });
      case UnaryOp::silu:
        return map1<C>(x, out, [](C v) { return v * vm::sigmoid(v); });
      case UnaryOp::gelu_exact:
        return map1<C>(x, out, [](C v) { return v * vm::normal_cdf(v); });
      // (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
      case UnaryOp::gelu_tanh:
        return map1<C>(x, out, [](C v) {
          return v * vm::sigmoid(C(1.5957691216057308) * (v + C(0.044715) * v * v * v));
        });
      case UnaryOp::sin:
        return map1<C>(x, out,
                       [](C v) { return static_cast<C>(std::sin(static_cast<double>(v))); });
      case UnaryOp::cos:
        return map1<C>(x, out,
                       [](C v) { return static_cast<C>(std::cos(static_cast<double>(v))); });
      default:
        break;
    }
  }
  fail<DTypeError>("[unary] this op is not defined for ", x.dtype);
}

template <class C>
void binary_any(BinaryOp op, const View& a, const View& b, const View& out) {
  switch (op) {
    case BinaryOp::add:
      return map2<C>(a, b, out, [](C x, C y) { return x + y; });
    case BinaryOp::sub:
      return map2<C>(a, b, out, [](C x, C y) { return x - y; });
    case BinaryOp::mul:
      return map2<C>(a, b, out, [](C x, C y) { return x * y; });
    case BinaryOp::minimum:
      return map2<C>(a, b, out, [](C x, C y) { return x < y || x != x ? x : y; });
    case BinaryOp::maximum:
      return map2<C>(a, b, out, [](C x, C y) { return x > y || x != x ? x : y; });
    case BinaryOp::eq:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x == y; });
    case BinaryOp::ne:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x != y; });
    case BinaryOp::lt:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x < y; });
    case BinaryOp::le:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x <= y; });
    case BinaryOp::gt:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x > y; });
    case BinaryOp::ge:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x >= y; });
    case BinaryOp::logical_and:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x != C(0) && y != C(0); });
    case BinaryOp::logical_or:
      return map2<C, bool>(a, b, out, [](C x, C y) { return x != C(0) || y != C(0); });
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    switch (op) {
      case BinaryOp::div:
        return map2<C>(a, b, out, [](C x, C y) { return x / y; });
      case BinaryOp::pow:
        return map2<C>(a, b, out, [](C x, C y) {
          return static_cast<C>(std::pow(static_cast<double>(x), static_cast<double>(y)));
        });
      default:
        break;
    }
  }
  fail<DTypeError>("[binary] this op is not defined for ", a.dtype,
                   ": cast to a floating type first");
}

}  // namespace

void unary(UnaryOp op, const View& x, const View& out) {
  check_shapes("unary", out, x);
  const DType compute = is_predicate(op) ? compute_type(x.dtype) : compute_type(x.dtype, out.dtype);
  visit_compute(compute, [&]<class C>() { unary_any<C>(op, x, out); });
}

void binary(BinaryOp op, const View& a, const View& b, const View& out) {
  check_shapes("binary", out, a, b);
  DType compute = compute_type(a.dtype, b.dtype);
  if (!is_predicate(op)) compute = compute_type(compute, out.dtype);
  visit_compute(compute, [&]<class C>() { binary_any<C>(op, a, b, out); });
}

void binary_scalar(BinaryOp op, const View& a, double scalar, bool scalar_left, const View& out) {
  // x^2 is common and exact this way too: both round the exact square once.
  if (op == BinaryOp::pow && scalar == 2.0 && !scalar_left) return unary(UnaryOp::square, a, out);
  check_shapes("binary_scalar", out, a);
  const DType compute = is_predicate(op) ? compute_type(a.dtype) : compute_type(a.dtype, out.dtype);
  visit_compute(compute, [&]<class C>() {
    C value = static_cast<C>(scalar);
    const View s{&value, dtype_of<C>, out.shape, Shape::filled(out.rank(), 0)};
    scalar_left ? binary_any<C>(op, s, a, out) : binary_any<C>(op, a, s, out);
  });
}

void where(const View& cond, const View& a, const View& b, const View& out) {
  check_shapes("where", out, cond, a, b);
  visit_compute(compute_type(compute_type(a.dtype, b.dtype), out.dtype), [&]<class C>() {
    map_blocks<C>(
        out,
        [](C* to, const C* c, const C* x, const C* y, int64_t n) {
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) to[i] = c[i] != C(0) ? x[i] : y[i];
        },
        cond, a, b);
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
    // Integers: a bound beyond the type's range does not bind; a fractional one moves inwards.
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
    map1<C>(x, out, [low, high](C v) {
      v = v < low ? low : v;
      return v > high ? high : v;
    });
  });
}

void swiglu(const View& gate, const View& up, const View& out) {
  check_shapes("swiglu", out, gate, up);
  const DType compute = compute_type(compute_type(gate.dtype, up.dtype), out.dtype);
  if (compute == kI64) fail<DTypeError>("[swiglu] is not defined for ", out.dtype);
  auto run = [&]<class C>() {
    map2<C>(gate, up, out, [](C g, C u) { return g * vm::sigmoid(g) * u; });
  };
  compute == kF64 ? run.operator()<double>() : run.operator()<float>();
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
