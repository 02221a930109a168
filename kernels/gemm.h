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
  bool fp8 = false;  ///< of a's rows and b's columns, rounded (fp8.h); not of f64
};

/// y = x Wᵀ + bias, of linear layers. x and y may be vectors.
Gemm linear_product(const View& x, const View& weight, const View& bias, const View& y, bool fp8);
/// dx = dy W, before it is multiplied with gelu's derivative.
Gemm gelu_linear_gradient_product(const View& dy, const View& weight, const View& dx, bool fp8);

/// Memory for the elements of a view, densely: in rows, or in columns if those are dense in it.
View dense_as_it_lies(void* data, const View& v);

/// `g` of operands that are rounded to FP8 already, to the values that they have then: dense
/// matrices of each distinct one of a batch, in `memory` (nullptr to ask for sizes), a's first. With
/// `keep_columns` what lies in columns does so there, too.
struct RoundedOperands {
  RoundedOperands(const Gemm& g, bool keep_columns);
  /// So many bytes, each operand at a multiple of 128.
  size_t bytes() const { return a_bytes + b_bytes; }
  /// Where rows are rounded to: [.., M, K] and [.., N, K]; and what they are rounded from.
  View a, b, from_a, from_b;
  size_t a_bytes, b_bytes;
  void place(void* memory);
  /// The product of a and b.
  Gemm product(const Gemm& g) const;
};

/// The same memory with its last two dimensions exchanged.
View transposed(View v);
/// The view as [rows, last dimension] if its rows are evenly spaced; else rank 0.
View as_matrix(const View& v);
/// A rank-1 view as one row.
View at_least_matrix(View v);

}  // namespace sheaf::kernels
