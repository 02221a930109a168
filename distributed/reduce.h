// Elementwise reductions in rank order: the arithmetic of every communicator.
#pragma once

#include <cstdint>
#include <span>

#include "sheaf/core/dtype.h"
#include "sheaf/core/communicator.h"

namespace sheaf {

/// out[i] = ((s0[i] ∘ s1[i]) ∘ s2[i]) ∘ ... for i in [0, count), where s0, s1, ... are `sources` in the order given and ∘ is +, max
/// or min. f32, bf16 and f16 are summed in f32 and rounded once, f64 in f64, integers wrap, bool is or / or / and. max and min
/// propagate NaN. `out` may be one of the sources. Runs on the calling thread only; an element's value depends only on the sources'
/// elements at its index.
void reduce_in_order(void* out, std::span<const void* const> sources, int64_t count, DType dtype, Reduction reduction);

}  // namespace sheaf
