// Elementwise kernels. Operands have the shape of the output: callers expand them with 0 strides.
// Any strides; an output may be the same memory as an operand, element for element.
//
// dtypes: f64 computes in f64; f32, bf16 and f16 in f32, rounded once when stored; integers and
// bool in i64, wrapped when stored. Operands of several types compute in the widest of these. Ops
// without an integer meaning throw DTypeError. f32 exp, log, tanh and functions built from them: within 3 ulp (the
// normal distribution function's tail: 10), see cpu/vector_math.h. An element's value depends only on the operands'
// elements, never on layout, length or threads.
#pragma once

#include <cstdint>

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

enum class UnaryOp : uint8_t {
  neg,
  exp,
  log,
  sqrt,
  rsqrt,
  reciprocal,
  tanh,
  sigmoid,
  abs,
  relu,
  silu,
  gelu_tanh,   ///< x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))  (Hendrycks and Gimpel 2016)
  gelu_exact,  ///< x Phi(x), Phi the standard normal distribution function
  square,
  isfinite,
  logical_not,  ///< 0 or 1, usually into a bool output
  sign,         ///< -1, 0, 1; NaN stays NaN
  sin,
  cos,
  softplus,  ///< log(1 + exp(x)), accurate also where that is small
  floor,
  round,  ///< halves to even
  log1p,  ///< log(1 + x), accurate also near 0
  expm1,  ///< exp(x) - 1, likewise
  erf,    ///< 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x
};
enum class BinaryOp : uint8_t {
  add,
  sub,
  mul,
  div,
  pow,
  minimum,
  maximum,  ///< NaN if either operand is
  eq,
  ne,
  lt,
  le,
  gt,
  ge,  ///< 0 or 1, usually into a bool output
  logical_and,
  logical_or,
};
/// Backwards of activations: dx = dy f'(x), or in terms of the output y if y was kept.
enum class BackwardOp : uint8_t {
  gelu_tanh,
  gelu_exact,
  silu,
  relu,     ///< 0 at x = 0, even for an infinite gradient
  tanh,     ///< dy (1 - y^2)
  sigmoid,  ///< dy y (1 - y)
};
/// True if the op's results are bools.
constexpr bool is_predicate(UnaryOp op) {
  return op == UnaryOp::isfinite || op == UnaryOp::logical_not;
}
constexpr bool is_predicate(BinaryOp op) { return op >= BinaryOp::eq; }

namespace cpu {

void unary(UnaryOp op, const View& x, const View& out);
void binary(BinaryOp op, const View& a, const View& b, const View& out);
/// a op scalar, or scalar op a if `scalar_left`. The scalar is rounded to the compute type of a and
/// out.
void binary_scalar(BinaryOp op, const View& a, double scalar, bool scalar_left, const View& out);
/// out = cond ? a : b
void where(const View& cond, const View& a, const View& b, const View& out);
/// out = cond ? x : scalar, or cond ? scalar : x if `scalar_first`. The scalar is rounded to the
/// compute type of x and out.
void where_scalar(const View& cond, const View& x, double scalar, bool scalar_first,
                  const View& out);
/// out = min(max(x, lo), hi); NaN stays NaN.
void clamp(const View& x, double lo, double hi, const View& out);

void activation_backward(BackwardOp op, const View& kept, const View& dy, const View& dx);
/// out = silu(gate) * up  (Shazeer 2020, "GLU variants improve transformer")
void swiglu(const View& gate, const View& up, const View& out);
void swiglu_backward(const View& gate, const View& up, const View& dy, const View& dgate,
                     const View& dup);
/// out = g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = min(max(up, -limit), limit); NaN stays NaN. Alpha and limit are
/// rounded to the compute type.
void clamped_swiglu(const View& gate, const View& up, double alpha, double limit, const View& out);
/// dgate is 0 unless gate <= limit, dup unless |up| <= limit, even for an infinite gradient.
void clamped_swiglu_backward(const View& gate, const View& up, const View& dy, double alpha, double limit, const View& dgate,
                             const View& dup);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. exp, log, tanh and functions built from them are CUDA's:
/// within 2 ulp in f32.
namespace cuda {

void unary(const Stream& stream, UnaryOp op, const View& x, const View& out);
void binary(const Stream& stream, BinaryOp op, const View& a, const View& b, const View& out);
void binary_scalar(const Stream& stream, BinaryOp op, const View& a, double scalar,
                   bool scalar_left, const View& out);
void where(const Stream& stream, const View& cond, const View& a, const View& b, const View& out);
void where_scalar(const Stream& stream, const View& cond, const View& x, double scalar,
                  bool scalar_first, const View& out);
void clamp(const Stream& stream, const View& x, double lo, double hi, const View& out);
void activation_backward(const Stream& stream, BackwardOp op, const View& kept, const View& dy,
                         const View& dx);
void swiglu(const Stream& stream, const View& gate, const View& up, const View& out);
void swiglu_backward(const Stream& stream, const View& gate, const View& up, const View& dy,
                     const View& dgate, const View& dup);
void clamped_swiglu(const Stream& stream, const View& gate, const View& up, double alpha, double limit, const View& out);
void clamped_swiglu_backward(const Stream& stream, const View& gate, const View& up, const View& dy, double alpha, double limit,
                             const View& dgate, const View& dup);

}  // namespace cuda
}  // namespace sheaf::kernels
