#include "sheaf/models/batch_sampler.h"

#include <algorithm>

#include "sheaf/core/error.h"

namespace sheaf::models {
SequentialWindows::SequentialWindows(Tokens tokens, int64_t context, int64_t max_targets)
    : tokens_(std::move(tokens)), context_(context) {
  check<ConfigError>(context >= 1, "[data] a context of ", context);
  check<DataError>(tokens_.size() >= 2, "[data] '", tokens_.name(), "': ", tokens_.size(),
                   " tokens leave nothing to predict");
  num_targets_ = tokens_.size() - 1;
  if (max_targets > 0) num_targets_ = std::min(num_targets_, max_targets);
}

int64_t SequentialWindows::fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  int64_t counted = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = std::min((first + i) * context_, num_targets_);
    const int64_t n = std::min(context_, num_targets_ - at);
    int32_t* input = inputs + i * context_;
    int32_t* target = targets + i * context_;
    tokens_.copy(at, n, input);
    tokens_.copy(at + 1, n, target);
    std::fill(input + n, input + context_, 0);
    std::fill(target + n, target + context_, kIgnoreIndex);
    counted += n;
  }
  return counted;
}

}  // namespace sheaf::models
