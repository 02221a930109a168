// In which order a stage of a pipeline takes micro-batches.
#pragma once

#include <cstdint>
#include <vector>

namespace sheaf {

/// One turn of a stage: it records the forward of a micro-batch, or differentiates it.
struct Turn {
  bool backward;
  int64_t micro_batch;
  bool operator==(const Turn&) const = default;
};

/// One forward, one backward (1F1B; Harlap et al., https://arxiv.org/abs/1806.03377, and Narayanan et al.,
/// https://arxiv.org/abs/2104.04473): of `stages`, stage `stage` begins with as many forwards as there are stages from it on,
/// then each backward is followed by the forward that it makes room for. A stage holds the activations of that many micro-batches, of a single stage one; of
/// its time it waits (stages - 1) / (micro_batches + stages - 1). Stages take turns of different micro-batches: forwards may
/// only send values on, to later stages, and not to all of them at once. Throws ConfigError for a stage that is none.
std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches);

}  // namespace sheaf
