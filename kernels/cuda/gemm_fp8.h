// Products of operands rounded to FP8 (Gemm::fp8): of their codes, if cuBLASLt supports that, else of the values that these encode.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/kernels/gemm.h"

namespace sheaf::kernels::cuda {

size_t gemm_fp8_workspace(const Gemm& g);
void gemm_fp8(const Stream& stream, const Gemm& g, Workspace workspace);

}  // namespace sheaf::kernels::cuda
