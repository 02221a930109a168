// One row of cross-entropy, shared by cross_entropy and linear_cross_entropy.
#pragma once

#include <algorithm>

#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/softcap.h"

namespace sheaf::kernels::cpu {

/// log(sum(exp(x))) of n elements.
template <class T>
inline ComputeType<T> log_sum_exp(const T* x, int64_t n) {
  const auto most = row_max(x, n);
  return most + std::log(sum_of_exp(x, n, most));
}

/// out = exp(x - lse) * scale, but at_target(exp(x - lse)) at `target`, if the row has it; out may be x. For logits
/// capped by 1 / inverse_cap, the gradient of those before the cap.
template <class T, class Out, class AtTarget, class C = ComputeType<T>>
inline void logit_row_backward(const T* x, int64_t n, int64_t target, C lse, C scale,
                               AtTarget&& at_target, Out* out, C inverse_cap = 0) {
  using L = Lanes<C>;
  const bool here = target >= 0 && target < n;
  // The target's element is computed separately, from x before it is overwritten.
  const C shifted = here ? static_cast<C>(x[target]) - lse : C(0);
  const C slope = here ? softcap_slope(static_cast<C>(x[target]), inverse_cap) : C(1);
  if (inverse_cap == 0) {
    for_lanes(n, [&](int64_t i, auto m) {
      store_lanes(out + i, exp(load_lanes(x + i, m) - L(lse)) * L(scale), m);
    });
  } else {
    for_lanes(n, [&](int64_t i, auto m) {
      const L logit = load_lanes(x + i, m);
      store_lanes(out + i, exp(logit - L(lse)) * L(scale) * softcap_slope(logit, L(inverse_cap)), m);
    });
  }
  if (!here) return;
  C one[kLanes];
  exp(L(shifted)).store(one);
  out[target] = Out(inverse_cap == 0 ? at_target(one[0]) : at_target(one[0]) * slope);
}

/// out = (exp(x - lse) - onehot(target)) * scale; out may be x.
template <class T, class Out, class C = ComputeType<T>>
inline void cross_entropy_row_backward(const T* x, int64_t n, int64_t target, C lse, C scale,
                                       Out* out, C inverse_cap = 0) {
  logit_row_backward(
      x, n, target, lse, scale, [&](C p) { return (p - C(1)) * scale; }, out, inverse_cap);
}

}  // namespace sheaf::kernels::cpu
