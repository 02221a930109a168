// One OpenMP team per rank thread. Libraries that use OpenMP share it; a pool of our own beside it would oversubscribe.
#include "sheaf/core/parallel.h"

#include <omp.h>

#include <algorithm>
#include <exception>

#include "sheaf/core/rank_context.h"

namespace sheaf {

int num_threads() { return RankContext::current().threads; }

namespace detail {

void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* closure) {
  if (n <= 0) return;
  RankContext& context = RankContext::current();
  const int64_t most = (n + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<int64_t>(context.threads, most));
  if (threads <= 1 || omp_in_parallel()) return fn(closure, 0, n);
  std::exception_ptr failure;
#pragma omp parallel num_threads(threads) shared(failure)
  {
    const int64_t t = omp_get_thread_num(), p = omp_get_num_threads();
    try {
      flush_denormals();
      if (n * t / p < n * (t + 1) / p) fn(closure, n * t / p, n * (t + 1) / p);
    } catch (...) {
#pragma omp critical(sheaf_parallel_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace detail
}  // namespace sheaf
