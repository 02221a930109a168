// The sum, maximum or minimum of several ranks' values, on a GPU that can read them all: the arithmetic of a reduction between ranks,
// as in distributed/reduce.h for the CPU.
#pragma once

#include <span>

#include "sheaf/core/communicator.h"
#include "sheaf/core/device.h"

namespace sheaf::kernels::cuda {

/// Most ranks in one call: their pointers are passed as a kernel's argument.
inline constexpr int kMostSources = 256;

/// out[i] = ((s0[i] ∘ s1[i]) ∘ s2[i]) ∘ ... for i in [0, count), all in device memory; ∘ is +, max or min. f32, bf16 and
/// f16 are summed in f32 and rounded once, f64 in f64, integers wrap, bool is or / or / and; max and min propagate NaN.
/// `out` may be one of the sources. The bits are those of the CPU's reduce_in_order. Throws CommError for more than
/// kMostSources.
void reduce_in_order(const Stream& stream, void* out, std::span<const void* const> sources, int64_t count, DType dtype,
                     Reduction reduction);

}  // namespace sheaf::kernels::cuda
