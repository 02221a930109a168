// A matrix product as the kernels of every device are asked for it, and its operands as matrices.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// c[.., M, N] = a[.., M, K] b[.., K, N] + bias[N] (View{} for none), or c += a b if `accumulate`
/// (then without bias, and c is f32 or f64). Strides and dtypes as matmul says.
struct Gemm {
  const char* who;
  View a, b, c;
  View bias;
  bool accumulate = false;
};

/// y = x Wᵀ + bias, of linear layers. x and y may be vectors.
Gemm linear_product(const View& x, const View& weight, const View& bias, const View& y);
/// dx = dy W, before it is multiplied with gelu's derivative.
Gemm gelu_linear_gradient_product(const View& dy, const View& weight, const View& dx);

/// The same memory with its last two dimensions exchanged.
View transposed(View v);
/// The view as [rows, last dimension] if its rows are evenly spaced; else rank 0.
View as_matrix(const View& v);
/// A rank-1 view as one row.
View at_least_matrix(View v);

}  // namespace sheaf::kernels
