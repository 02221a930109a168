// The product of bf16 matrices by the bf16 instructions of newer x86 machines.
#pragma once

#include <cstddef>

#include "sheaf/kernels/cpu/gemm_part.h"

namespace sheaf::kernels::cpu {

/// By matrix tiles; only where amx::available().
namespace amx {

/// Bytes of scratch that gemm needs for this part: 2 MiB at most.
size_t gemm_scratch(const GemmPart& p);
/// One thread's part; a and b are bf16 of any strides (fast if one of them is 1), c is bf16 or f32 (f32 if it
/// accumulates), bias bf16 or f32. `scratch` is 128-byte aligned.
void gemm(const GemmPart& p, void* scratch);

}  // namespace amx

/// The same by vectors of pairs; only where dot::available().
namespace dot {

size_t gemm_scratch(const GemmPart& p);
void gemm(const GemmPart& p, void* scratch);

}  // namespace dot
}  // namespace sheaf::kernels::cpu
