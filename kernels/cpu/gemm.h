// The product behind matmul, linear and linear_cross_entropy: f32 and f64 by vectors, bf16 by the instructions that the
// machine has for it (AMX, AVX512_BF16); f16, and bf16 elsewhere, are multiplied as f32.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

/// c[.., M, N] = a[.., M, K] b[.., K, N] + bias[N] (View{} for none), or c += a b if `accumulate`
/// (then without bias, and c is f32 or f64). Strides and dtypes as matmul says.
struct Gemm {
  const char* who;
  View a, b, c;
  View bias;
  bool accumulate = false;
};
size_t gemm_workspace(const Gemm& g);
void gemm(const Gemm& g, Workspace workspace);

/// The same memory with its last two dimensions exchanged.
View transposed(View v);
/// The view as [rows, last dimension] if its rows are evenly spaced; else rank 0.
View as_matrix(const View& v);

}  // namespace sheaf::kernels::cpu
