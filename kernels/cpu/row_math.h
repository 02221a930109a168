// Sums and maxima of one row, sixteen lanes at a time: the order depends only on the row's length.
#pragma once

#include <limits>

#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::cpu {

/// The largest of n elements; -inf for none. NaN is not propagated (exp of a NaN element is).
template <class T>
inline ComputeType<T> row_max(const T* x, int64_t n) {
  using C = ComputeType<T>;
  using L = Lanes<C>;
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  L most(kLowest);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max(load_lanes(x + i), most);
  C out = max_lane(most);
  for (; i < n; ++i) {
    const C e = static_cast<C>(x[i]);
    out = e > out ? e : out;
  }
  return out;
}

/// Four chains of lanes, so that additions need not wait for one another; lanes past the end
/// contribute `zero`. f(i, n) gives the lanes at i.
template <class C, class F>
SHEAF_INLINE C row_sum(int64_t size, F&& f) {
  using L = Lanes<C>;
  using Whole = std::integral_constant<int, kLanes>;
  L s0(C(0)), s1(C(0)), s2(C(0)), s3(C(0));
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    s0 = s0 + f(i, Whole()), s1 = s1 + f(i + kLanes, Whole());
    s2 = s2 + f(i + 2 * kLanes, Whole()), s3 = s3 + f(i + 3 * kLanes, Whole());
  }
  for (; i + kLanes <= size; i += kLanes) s0 = s0 + f(i, Whole());
  if (i < size) s1 = s1 + f(i, static_cast<int>(size - i));
  return sum((s0 + s1) + (s2 + s3));
}

/// The sum of exp(x - shift) over a row. Masked lanes of the tail must not count as exp(0 - shift).
template <class T, class C = ComputeType<T>>
inline C sum_of_exp(const T* x, int64_t n, C shift) {
  using L = Lanes<C>;
  return row_sum<C>(n, [&](int64_t i, auto m) {
    L e = exp(load_lanes(x + i, m) - L(shift));
    if constexpr (!std::is_same_v<decltype(m), std::integral_constant<int, kLanes>>) {
      C buffer[kLanes] = {};
      e.store(buffer, m);
      e = L::load(buffer);
    }
    return e;
  });
}

}  // namespace sheaf::kernels::cpu
