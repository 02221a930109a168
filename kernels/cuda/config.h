// Whether this build has CUDA. The build system decides, by finding nvcc; nobody sets it by hand.
#pragma once

namespace sheaf::kernels {

/// True if the functions of kernels/cuda/ exist. False: their headers still compile, calling them
/// does not link, so every call stands under `if constexpr (kHasCuda)` in a template or under
/// `#if SHEAF_HAS_CUDA`.
inline constexpr bool kHasCuda = SHEAF_HAS_CUDA != 0;

}  // namespace sheaf::kernels
