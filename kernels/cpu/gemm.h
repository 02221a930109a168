// The product used by matmul, linear and linear_cross_entropy: f32 and f64 by vectors, bf16 by the machine's instructions for it
// (AMX, AVX512_BF16); f16, and bf16 on other machines, are multiplied as f32.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/kernels/gemm.h"

namespace sheaf::kernels::cpu {

/// The workspace that gemm() needs for `g`, and the product.
size_t gemm_workspace(const Gemm& g);
void gemm(const Gemm& g, Workspace workspace);

}  // namespace sheaf::kernels::cpu
