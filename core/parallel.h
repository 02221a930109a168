// parallel_for: the only way kernels use threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sheaf {

namespace detail {
using RangeFn = void (*)(void* closure, int64_t begin, int64_t end);
void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* closure);
}  // namespace detail

/// Compute threads of the calling rank.
int num_threads();

/// Calls f(begin, end) on disjoint ranges that cover [0, n), each of at least `grain` items, on the rank's threads. Runs inline if
/// one range suffices or if called from inside another parallel_for. The first exception is rethrown on the caller. The ranges depend
/// on n, grain and the thread count alone; values computed by f must not depend on them.
template <class F>
void parallel_for(int64_t n, int64_t grain, F&& f) {
  using Fn = std::remove_reference_t<F>;
  detail::parallel_ranges(
      n, grain, [](void* closure, int64_t begin, int64_t end) { (*static_cast<Fn*>(closure))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace sheaf
