// Soft caps, cap tanh(x / cap), as Gemma 2 applies to scores and logits (https://arxiv.org/abs/2408.00118).
#pragma once

#include "sheaf/kernels/cpu/vector_math.h"

namespace sheaf::kernels::cpu {

/// x = cap tanh(factor x / cap), for n numbers.
template <class C>
SHEAF_INLINE void softcap(C* x, int64_t n, C factor, C cap) {
  const C inner = factor / cap;
  for (int64_t i = 0; i < n; ++i) x[i] = cap * vm::tanh(x[i] * inner);
}

/// The derivative at capped numbers y, or lanes of them: 1 - (y / cap)². Takes the inverse of the cap; with 0 it is 1.
template <class C>
SHEAF_INLINE C softcap_slope(C y, C inverse_cap) {
  const C t = y * inverse_cap;
  return C(1) - t * t;
}

}  // namespace sheaf::kernels::cpu
