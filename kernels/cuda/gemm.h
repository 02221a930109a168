// The product behind matmul, linear and linear_cross_entropy on a GPU: views of any strides as
// products of cuBLASLt (product.h).
#pragma once

#include <algorithm>

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

using cpu::as_matrix;
using cpu::transposed;
/// A rank-1 view as one row.
View at_least_matrix(View v);
/// Dense memory for the view's elements as [rows, last dimension].
View dense_matrix(void* data, const View& v);

/// Parts of a workspace begin at multiples of this.
constexpr size_t align_part(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Cuts a workspace into aligned parts.
class Parts {
 public:
  Parts(const char* who, Workspace w)
      : who_(who), next_(static_cast<char*>(w.data)), left_(w.bytes) {}
  void* take(size_t bytes) {
    bytes = align_part(bytes);
    check<ShapeError>(bytes <= left_, '[', who_, "] workspace too small by ",
                      bytes - std::min(bytes, left_), " bytes");
    void* out = next_;
    next_ += bytes, left_ -= bytes;
    return out;
  }
  Workspace rest() const { return {next_, left_}; }

 private:
  const char* who_;
  char* next_;
  size_t left_;
};

}  // namespace sheaf::kernels::cuda
