// Requirements of the normalisation kernels of all devices on their operands.
#pragma once

#include "sheaf/core/view.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels {

/// Checks one of y, dy, dx: it must be like x.
inline void check_like(const char* who, const View& x, const View& v) {
  check<ShapeError>(x.rank() >= 1 && v.shape == x.shape, "[", who, "] shapes ", x.shape, " and ",
                    v.shape);
  check<DTypeError>(v.dtype == x.dtype, "[", who, "] dtypes ", x.dtype, " and ", v.dtype);
}
inline void check_vector(const char* who, const View& x, const View& v, bool any_dtype = false) {
  if (!given(v)) return;
  check<ShapeError>(
      v.rank() == 1 && v.shape[0] == x.shape.back() && (v.shape[0] <= 1 || v.strides[0] == 1), "[",
      who, "] a weight or bias of shape ", v.shape, " for input ", x.shape,
      " must be a dense vector");
  check<DTypeError>(v.dtype == x.dtype || (any_dtype && v.dtype == kF32 && x.dtype != kF64), "[",
                    who, "] ", v.dtype, " for input ", x.dtype);
}
inline void check_statistic(const char* who, const View& x, const View& v, bool stored) {
  check<ShapeError>((!stored || v.contiguous()) && v.numel() * x.shape.back() == x.numel(), "[",
                    who, "] statistics of shape ", v.shape, " for input ", x.shape);
  check<DTypeError>(v.dtype == (x.dtype == kF64 ? kF64 : kF32), "[", who, "] statistics in ",
                    v.dtype);
}

/// `mean` is layer normalisation's; r and sum are given if the input is a sum.
inline void check_forward(const char* who, const View& x, const View& weight, const View& bias,
                          const View& y, const View* mean, const View& rstd, const View* r = {},
                          const View* sum = {}) {
  check_like(who, x, y), check_vector(who, x, weight), check_vector(who, x, bias);
  if (mean) check_statistic(who, x, *mean, true);
  check_statistic(who, x, rstd, true);
  if (r) check_like(who, x, *r), check_like(who, x, *sum);
}
inline void check_backward(const char* who, const View& dy, const View& x, const View& weight,
                           const View* mean, const View& rstd, const View& dx, const View& dweight,
                           const View& dbias, const View& dsum) {
  check_like(who, x, dy), check_vector(who, x, weight);
  if (mean) check_statistic(who, x, *mean, false);
  check_statistic(who, x, rstd, false);
  if (given(dx)) check_like(who, x, dx);
  check_vector(who, x, dweight, true), check_vector(who, x, dbias, true);
  if (given(dsum)) check_like(who, x, dsum);
}

}  // namespace sheaf::kernels
