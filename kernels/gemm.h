// The arguments of a matrix product on every device, and its operands as matrices.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// c[.., M, N] = a[.., M, K] b[.., K, N] + bias[N] (View{} for none), or c += a b if `accumulate` (then without bias, and c is f32 or
/// f64). Strides and dtypes as for matmul.
struct Gemm {
  const char* who;
  View a, b, c;
  View bias;
  bool accumulate = false;
  bool fp8 = false;  ///< a's rows and b's columns are rounded first (fp8.h); not for f64
};

/// y = x Wᵀ + bias, of linear layers. x and y may be vectors.
Gemm linear_product(const View& x, const View& weight, const View& bias, const View& y, bool fp8);
/// dx = dy W, before it is multiplied by gelu's derivative.
Gemm gelu_linear_gradient_product(const View& dy, const View& weight, const View& dx, bool fp8);

/// A dense view of `v`'s shape at `data`: row-major, or column-major if that is dense in `v`.
View dense_as_it_lies(void* data, const View& v);

/// `g` with operands rounded to FP8, as the values they then have: dense, each distinct matrix of a batch once, in `memory` (nullptr
/// to ask for sizes), a's first. With `keep_columns`, column-major operands stay so.
struct RoundedOperands {
  RoundedOperands(const Gemm& g, bool keep_columns);
  /// Bytes needed, with each operand at a multiple of 128.
  size_t bytes() const { return a_bytes + b_bytes; }
  /// Where rounded rows are stored, [.., M, K] and [.., N, K], and what they are rounded from.
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
