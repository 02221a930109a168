// Requirements of the short-convolution kernels of all devices on their operands.
#pragma once

#include "sheaf/kernels/causal_conv.h"
#include "sheaf/kernels/delta_rule_operands.h"

namespace sheaf::kernels {

/// `y` as the result or its gradient.
inline void check_causal_conv(const char* who, const CausalConvOperands& o, const View& y) {
  const View &x = o.x, &weight = o.weight;
  check<ShapeError>(x.rank() == 3 && y.shape == x.shape && weight.rank() == 2 && weight.shape[0] == x.shape[2] && weight.shape[1] > 0,
                    "[", who, "] input [B,T,C] ", x.shape, ", output ", y.shape, ", weight [C,W] ", weight.shape);
  check<DTypeError>(is_floating(x.dtype) && weight.dtype == x.dtype && y.dtype == x.dtype, "[", who, "] dtypes ", x.dtype, ", output ",
                    y.dtype, ", weight ", weight.dtype);
  for (const View* v : {&x, &weight, &y})
    check<ShapeError>(v->strides.back() == 1 || v->shape.back() <= 1 || v->numel() == 0, "[", who,
                      "] the last dimension must be dense, strides are ", v->strides);
  check_begins(who, o.begins, x);
}

inline void check_causal_conv_backward(const char* who, const CausalConvOperands& o, const View& dy, const View& dx,
                                       const View& dweight) {
  check_causal_conv(who, o, dy);
  if (given(dx)) check_causal_conv(who, o, dx);
  if (!given(dweight)) return;
  check<ShapeError>(dweight.shape == o.weight.shape, "[", who, "] gradient ", dweight.shape, " of a weight ", o.weight.shape);
  check<DTypeError>(dweight.dtype == (o.x.dtype == kF64 ? kF64 : kF32), "[", who, "] a weight's gradient in ", dweight.dtype, " for ",
                    o.x.dtype);
  check<ShapeError>(dweight.strides.back() == 1 || dweight.shape.back() <= 1, "[", who, "] the last dimension must be dense, strides are ",
                    dweight.strides);
}

}  // namespace sheaf::kernels
