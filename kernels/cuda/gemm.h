// The product behind matmul, linear and linear_cross_entropy on a GPU: views of any strides as
// products of cuBLASLt (product.h).
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/cpu/gemm.h"

namespace sheaf::kernels::cuda {

/// c[.., M, N] = a[.., M, K] b[.., K, N] + bias[N] (View{} for none), or c += a b if `accumulate`
/// (then without bias, and c is f32 or f64). Strides and dtypes as matmul says.
///
/// Operands that have no unit stride in the last two dimensions are copied into the workspace
/// first. f32 is multiplied as f32 (no TF32); bf16 and f16 with f32 accumulation.
struct Gemm {
  const char* who;
  View a, b, c;
  View bias;
  bool accumulate = false;
};
size_t gemm_workspace(const Gemm& g);
void gemm(const Stream& stream, const Gemm& g, Workspace workspace);
/// What a product may do on its way, with `other`.
enum class Fused : uint8_t {
  row_sums,       ///< stores other[M] = the sum of each row of a; without bias
  gelu,           ///< other = the result; c = its gelu, tanh form. `other` as c, bf16 or f16
  gelu_gradient,  ///< c = the result * gelu'(other); without bias. `other` as c, bf16 or f16
};
/// gemm() of two matrices, storing, and that, in one kernel of cuBLASLt. False if it has none for
/// these dtypes, sizes and strides (`other` is dense, of c's dtype, and so is c for gelu): then
/// nothing is stored.
bool gemm_with(const Stream& stream, const Gemm& g, Fused fused, const View& other,
               Workspace workspace);

using cpu::as_matrix;
using cpu::transposed;
/// A rank-1 view as one row.
View at_least_matrix(View v);
/// Dense memory for the view's elements as [rows, last dimension].
View dense_matrix(void* data, const View& v);

}  // namespace sheaf::kernels::cuda
