// The product used by matmul, linear and linear_cross_entropy on a GPU: views of any strides as
// products of cuBLASLt (product.h).
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/kernels/gemm.h"

namespace sheaf::kernels::cuda {

/// Operands without a unit stride in the last two dimensions are first copied to the workspace. f32 is multiplied
/// as f32 (no TF32); bf16 and f16 with f32 accumulation.
size_t gemm_workspace(const Gemm& g);
void gemm(const Stream& stream, const Gemm& g, Workspace workspace);
/// An operation fused into a product, with operand `other`.
enum class Fused : uint8_t {
  row_sums,       ///< stores other[M] = the sum of each row of a; without bias
  gelu,           ///< other = the result; c = its gelu, tanh form. `other` as c, bf16 or f16
  gelu_gradient,  ///< c = the result * gelu'(other); without bias. `other` as c, bf16 or f16
};
/// gemm() of two matrices, storing, together with `fused`, in one kernel of cuBLASLt. False, with nothing stored, if it has none for
/// these dtypes, sizes and strides (`other` is dense, of c's dtype, and so is c for gelu).
bool gemm_with(const Stream& stream, const Gemm& g, Fused fused, const View& other,
               Workspace workspace);

/// Dense memory for the view's elements as [rows, last dimension].
View dense_matrix(void* data, const View& v);

}  // namespace sheaf::kernels::cuda
