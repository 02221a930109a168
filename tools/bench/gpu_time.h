// Time on a GPU, by its own clock, and on whatever device a rank has.
#pragma once

#include <cstdint>
#include <functional>

namespace sheaf::bench {

/// Seconds that the stream of this rank's GPU takes for what `enqueue` puts there, between two events; the host waits
/// for the second. The stream is idle when it begins, so the host's lead over the device, some microseconds for the
/// first launch, is included.
double gpu_seconds(const std::function<void()>& enqueue);
/// The same where this rank's device is a GPU, else by the host's clock.
double device_seconds(const std::function<void()>& run);

/// Seconds per call, as time_small gives them: `iterations` calls in a row; if 0, as many as take
/// about `min_seconds`, and their number is left there.
double time_on_gpu(const std::function<void()>& call, int64_t& iterations, double min_seconds);

}  // namespace sheaf::bench
