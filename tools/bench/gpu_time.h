// Timing on a GPU, with events, and on whatever device a rank has.
#pragma once

#include <cstdint>
#include <functional>

namespace sheaf::bench {

/// Seconds that this rank's GPU takes for the work that `enqueue` puts on its stream, between two events; the host waits for the
/// second. The stream is idle at the first, so the latency of the first launch, some microseconds, is included.
double gpu_seconds(const std::function<void()>& enqueue);
/// The same where this rank's device is a GPU, else by the host's clock.
double device_seconds(const std::function<void()>& run);

/// Seconds per call, as time_small measures them: `iterations` consecutive calls; if 0, as many as take about `min_seconds`, and
/// `iterations` is set to that number.
double time_on_gpu(const std::function<void()>& call, int64_t& iterations, double min_seconds);

}  // namespace sheaf::bench
