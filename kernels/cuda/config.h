// Whether this build has CUDA. The build system decides, by finding nvcc; nobody sets it by hand.
#pragma once

namespace sheaf::kernels {

/// True if the functions of kernels/cuda/ exist. If not, their headers still compile but calls do
/// not link: every call stands under `if constexpr (kHasCuda)`, or `#if SHEAF_HAS_CUDA` where
/// CUDA's own headers are needed too.
inline constexpr bool kHasCuda = SHEAF_HAS_CUDA != 0;

}  // namespace sheaf::kernels
