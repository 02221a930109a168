#include "sheaf/models/batch_sampler.h"

#include <algorithm>

#include "sheaf/core/error.h"

namespace sheaf::models {

SequentialWindows::SequentialWindows(Tokens tokens, int64_t context, int64_t max_targets)
    : tokens_(std::move(tokens)), context_(context) {
  check<ConfigError>(context >= 1, "[data] a context of ", context);
  if (tokens_.example_end()) {
    examples_.emplace(tokens_, context);
    order_ = WindowStarts::of_windows(examples_->num_windows(), /*seed=*/0, WindowOrder::shuffled);
    num_windows_ = num_targets_ = 0;
    for (int64_t i = 0; i < examples_->num_windows(); ++i, ++num_windows_) {
      const int64_t more = examples_->num_targets((*order_)(i));
      if (i > 0 && max_targets > 0 && num_targets_ + more > max_targets) break;
      num_targets_ += more;
    }
    return;
  }
  check<DataError>(tokens_.size() >= 2, "[data] '", tokens_.name(), "': ", tokens_.size(),
                   " tokens leave nothing to predict");
  num_targets_ = tokens_.size() - 1;
  if (max_targets > 0) num_targets_ = std::min(num_targets_, max_targets);
  num_windows_ = (num_targets_ + context_ - 1) / context_;
}

int64_t SequentialWindows::fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  int64_t counted = 0;
  for (int64_t i = first; i < first + count; ++i, inputs += context_, targets += context_)
    counted += fill_window(i, inputs, targets);
  return counted;
}

int64_t SequentialWindows::fill_window(int64_t i, int32_t* inputs, int32_t* targets) const {
  int64_t count = 0;
  if (i < num_windows_ && examples_) {
    const int64_t window = (*order_)(i);
    examples_->fill(window, inputs, targets);
    return examples_->num_targets(window);
  }
  if (i < num_windows_) {
    const int64_t at = i * context_;
    count = std::min(context_, num_targets_ - at);
    tokens_.copy(at, count, inputs);
    tokens_.copy(at + 1, count, targets);
  }
  std::fill(inputs + count, inputs + context_, 0);
  std::fill(targets + count, targets + context_, kIgnoreIndex);
  return count;
}

}  // namespace sheaf::models
