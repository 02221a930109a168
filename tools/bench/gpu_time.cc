#include "sheaf/tools/bench/gpu_time.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/tools/bench/probe.h"

namespace sheaf::bench {

double gpu_seconds(const std::function<void()>& enqueue) {
  if constexpr (kernels::kHasCuda) {
    namespace cuda = kernels::cuda;
    using Event = std::unique_ptr<void, void (*)(cuda::EventHandle)>;
    const RankContext& context = RankContext::current();
    const Stream stream = context.stream(context.device);
    cuda::synchronize(stream);
    const Event begin(cuda::make_timed_event(), cuda::destroy_event),
        end(cuda::make_timed_event(), cuda::destroy_event);
    cuda::record(begin.get(), stream);
    enqueue();
    cuda::record(end.get(), stream);
    cuda::synchronize(end.get());
    return cuda::seconds_between(begin.get(), end.get());
  } else {
    fail<ConfigError>("[bench] this build has no CUDA");
  }
}

double device_seconds(const std::function<void()>& run) {
  if (RankContext::current().device.is_cuda()) return gpu_seconds(run);
  const double begin = now();
  run();
  return now() - begin;
}

double time_on_gpu(const std::function<void()>& call, int64_t& iterations, double min_seconds) {
  constexpr int64_t kMost = 100'000;
  const auto time = [&](int64_t calls) {
    return gpu_seconds([&] {
      for (int64_t i = 0; i < calls; ++i) call();
    });
  };
  if (iterations == 0) {
    time(1);  // loads the kernel's code
    // Multiply by ten until they take a tenth of the time, then scale in proportion.
    int64_t calls = 1;
    double seconds = time(calls);
    while (seconds < 0.1 * min_seconds && calls < kMost) seconds = time(calls *= 10);
    const double wanted = std::ceil(static_cast<double>(calls) * min_seconds / seconds);
    iterations = static_cast<int64_t>(std::clamp(wanted, 1.0, static_cast<double>(kMost)));
  }
  return time(iterations) / static_cast<double>(iterations);
}

}  // namespace sheaf::bench
