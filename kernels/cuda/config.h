// Whether this build has CUDA. The build system decides, by finding nvcc; nobody sets it by hand.
#pragma once

/// 1 in builds with --config=emulated: kernels are compiled for the CPU and run there
/// (emulation.h).
#ifndef SHEAF_CUDA_EMULATED
#define SHEAF_CUDA_EMULATED 0
#endif

namespace sheaf::kernels {

/// True if the functions of namespace kernels::cuda exist. If not, their declarations still compile
/// but calls do not link: every call stands under `if constexpr (kHasCuda)`, or `#if
/// SHEAF_HAS_CUDA` where CUDA's own headers are needed too.
inline constexpr bool kHasCuda = SHEAF_HAS_CUDA != 0;
inline constexpr bool kEmulatedCuda = SHEAF_CUDA_EMULATED != 0;

}  // namespace sheaf::kernels
