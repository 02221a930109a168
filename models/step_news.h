// StepNews: what ranks tell each other after a step: how much memory it took, and whether a rank was asked to end the run.
#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include "sheaf/core/communicator.h"

namespace sheaf::models {

/// It is sent asynchronously, so that a step that is not logged does not wait for it.
class StepNews {
 public:
  /// `lane`: null if there is one rank.
  StepNews(Communicator* lane, int rank, int world)
      : lane_(lane), rank_(static_cast<size_t>(rank)), values_(2 * static_cast<size_t>(world)) {}
  StepNews(const StepNews&) = delete;
  // A lane uses our memory until its transfer is over. Every rank that ran the step takes part, whatever happens on this one.
  ~StepNews() {
    try {
      sent_.sync();
    } catch (const std::exception&) {
    }
  }

  void send(int64_t peak, int signal) {
    std::fill(values_.begin(), values_.end(), 0);
    values_[rank_] = peak;
    values_[values_.size() / 2 + rank_] = signal;
    const auto count = static_cast<int64_t>(values_.size());
    if (lane_) sent_ = lane_->all_reduce(values_.data(), count, kI64, Reduction::max, "step_news");
  }
  /// Waits for what was sent last.
  void receive() { sent_.sync(); }

  std::vector<int64_t> peaks() const { return {values_.begin(), values_.begin() + values_.size() / 2}; }
  int signal() const { return static_cast<int>(*std::max_element(values_.begin() + values_.size() / 2, values_.end())); }

 private:
  Communicator* lane_;
  size_t rank_;
  std::vector<int64_t> values_;
  Event sent_;
};

}  // namespace sheaf::models
