// Functions of elements, selected inside a kernel by its arguments: for kernels of one op (elementwise.cu) and of several (fused.cu).
// Compiled without contraction, -fmad=false: so both give the same bits.
#pragma once

#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::cuda {

template <class C>
__device__ C sigmoid(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 1.0f / (1.0f + expf(-x));
  else
    return 1.0 / (1.0 + exp(-x));
}
template <class C>
__device__ C normal_cdf(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 0.5f * erfcf(-0.70710678f * x);
  else
    return 0.5 * erfc(-0.70710678118654752 * x);
}
template <class C>
__device__ C normal_pdf(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 0.39894228f * expf(-0.5f * x * x);
  else
    return 0.39894228040143268 * exp(-0.5 * x * x);
}

// sqrt(8 / pi): (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
constexpr double kGelu = 1.5957691216057308, kGeluCubic = 0.044715;

/// use(f) with the function of one operand that `op` names.
template <class C, class Use>
__device__ void choose_unary(UnaryOp op, Use use) {
  switch (op) {
    case UnaryOp::neg:
      return use([](C v) { return -v; });
    case UnaryOp::abs:
      return use([](C v) { return v < C(0) ? -v : v == C(0) ? C(0) : v; });
    case UnaryOp::square:
      return use([](C v) { return v * v; });
    case UnaryOp::sign:
      return use([](C v) { return v > C(0) ? C(1) : v < C(0) ? C(-1) : v; });
    case UnaryOp::relu:
      return use([](C v) { return v < C(0) ? C(0) : v; });
    case UnaryOp::logical_not:
      return use([](C v) { return C(v == C(0)); });
    case UnaryOp::isfinite:
      return use([](C v) { return C(v - v == C(0)); });  // 0 exactly where v is finite
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    constexpr bool kSingle = std::is_same_v<C, float>;
    switch (op) {
      case UnaryOp::exp:
        return use([](C v) { return kSingle ? C(expf(v)) : C(::exp(v)); });
      case UnaryOp::log:
        return use([](C v) { return kSingle ? C(logf(v)) : C(::log(v)); });
      case UnaryOp::sqrt:
        return use([](C v) { return kSingle ? C(sqrtf(v)) : C(::sqrt(v)); });
      case UnaryOp::rsqrt:
        return use([](C v) { return C(1) / (kSingle ? C(sqrtf(v)) : C(::sqrt(v))); });
      case UnaryOp::reciprocal:
        return use([](C v) { return C(1) / v; });
      case UnaryOp::tanh:
        return use([](C v) { return kSingle ? C(tanhf(v)) : C(::tanh(v)); });
      case UnaryOp::sigmoid:
        return use([](C v) { return sigmoid(v); });
      case UnaryOp::silu:
        return use([](C v) { return v * sigmoid(v); });
      case UnaryOp::gelu_exact:
        return use([](C v) { return v * normal_cdf(v); });
      case UnaryOp::gelu_tanh:
        return use([](C v) { return v * sigmoid(C(kGelu) * (v + C(kGeluCubic) * v * v * v)); });
      case UnaryOp::sin:
        return use([](C v) { return kSingle ? C(sinf(v)) : C(::sin(v)); });
      case UnaryOp::cos:
        return use([](C v) { return kSingle ? C(cosf(v)) : C(::cos(v)); });
      case UnaryOp::softplus:
        return use([](C v) {
          const C a = v < C(0) ? v : -v;
          return (v < C(0) ? C(0) : v) + (kSingle ? C(log1pf(expf(a))) : C(::log1p(::exp(a))));
        });
      case UnaryOp::floor:
        return use([](C v) { return kSingle ? C(floorf(v)) : C(::floor(v)); });
      case UnaryOp::round:
        return use([](C v) { return kSingle ? C(rintf(v)) : C(::rint(v)); });
      case UnaryOp::log1p:
        return use([](C v) { return kSingle ? C(log1pf(v)) : C(::log1p(v)); });
      case UnaryOp::expm1:
        return use([](C v) { return kSingle ? C(expm1f(v)) : C(::expm1(v)); });
      case UnaryOp::erf:
        return use([](C v) { return kSingle ? C(erff(v)) : C(::erf(v)); });
      default:
        break;
    }
  }
  use([](C v) { return v; });
}

/// use(f) with the function of two operands that `op` names.
template <class C, class Use>
__device__ void choose_binary(BinaryOp op, Use use) {
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
    case BinaryOp::eq:
      return use([](C x, C y) { return C(x == y); });
    case BinaryOp::ne:
      return use([](C x, C y) { return C(x != y); });
    case BinaryOp::lt:
      return use([](C x, C y) { return C(x < y); });
    case BinaryOp::le:
      return use([](C x, C y) { return C(x <= y); });
    case BinaryOp::gt:
      return use([](C x, C y) { return C(x > y); });
    case BinaryOp::ge:
      return use([](C x, C y) { return C(x >= y); });
    case BinaryOp::logical_and:
      return use([](C x, C y) { return C(x != C(0) && y != C(0)); });
    case BinaryOp::logical_or:
      return use([](C x, C y) { return C(x != C(0) || y != C(0)); });
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    if (op == BinaryOp::div) return use([](C x, C y) { return x / y; });
    use([](C x, C y) {
      return static_cast<C>(::pow(static_cast<double>(x), static_cast<double>(y)));
    });
  }
}

/// use(f) with the function of the kept value and the output's gradient that `op` names.
template <class C, class Use>
__device__ void choose_backward(BackwardOp op, Use use) {
  switch (op) {
    case BackwardOp::gelu_exact:
      return use([](C v, C d) { return d * (normal_cdf(v) + v * normal_pdf(v)); });
    case BackwardOp::gelu_tanh:  // with s = sigmoid(2u): y = x s, and ds/dx = s (1 - s) 2u'
      return use([](C v, C d) {
        const C s = sigmoid(C(kGelu) * (v + C(kGeluCubic) * v * v * v));
        return d * (s + v * s * (C(1) - s) * C(kGelu) * (C(1) + C(3) * C(kGeluCubic) * v * v));
      });
    case BackwardOp::silu:
      return use([](C v, C d) {
        const C s = sigmoid(v);
        return d * (s * (C(1) + v * (C(1) - s)));
      });
    case BackwardOp::relu:
      return use([](C v, C d) { return v > C(0) ? d : C(0); });
    case BackwardOp::tanh:
      return use([](C y, C d) { return d * (C(1) - y * y); });
    case BackwardOp::sigmoid:
      return use([](C y, C d) { return d * (y * (C(1) - y)); });
  }
}

/// out = silu(gate) * up
template <class C>
__device__ C swiglu_of(C gate, C up) {
  return gate * sigmoid(gate) * up;
}
/// out = gate sigmoid(alpha gate) (up + 1)
template <class C>
__device__ C shifted_swiglu_of(C gate, C up, C alpha) {
  return gate * sigmoid(alpha * gate) * (up + C(1));
}

/// NaN stays NaN.
template <class C>
__device__ C clamp_of(C x, C low, C high) {
  const C v = x < low ? low : x;
  return v > high ? high : v;
}

}  // namespace sheaf::kernels::cuda
