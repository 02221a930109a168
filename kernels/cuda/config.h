// Whether this build has CUDA. The build system decides, by finding nvcc; it is not set by hand.
#pragma once

namespace sheaf::kernels {

/// True if the functions of namespace kernels::cuda exist. If not, their declarations still compile
/// but calls do not link: every call is under `if constexpr (kHasCuda)`, or `#if
/// SHEAF_HAS_CUDA` where CUDA's own headers are needed too.
inline constexpr bool kHasCuda = SHEAF_HAS_CUDA != 0;

/// True in builds with --config=emulated: kernels are compiled for the CPU and run there (emulation.h). A function, so that
/// its callers are compiled once for both; targets that must differ have SHEAF_CUDA_EMULATED, 0 or 1, among their
/// local_defines (EMULATED_DEFINES in tools/bazel/cuda/defs.bzl).
bool emulated_cuda();

}  // namespace sheaf::kernels
