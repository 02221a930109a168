#include "sheaf/distributed/failure_board.h"

namespace sheaf {

bool FailureBoard::raise(JobFailure failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return false;
    failure_ = failure;
  }
  std::lock_guard lock(subscribers_mutex_);
  for (auto& [id, callback] : subscribers_) callback(failure);
  return true;
}

std::optional<JobFailure> FailureBoard::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool FailureBoard::failed() const {
  std::lock_guard lock(mutex_);
  return failure_.has_value();
}

int FailureBoard::subscribe(std::function<void(const JobFailure&)> callback) {
  std::lock_guard lock(subscribers_mutex_);
  const int id = next_id_++;
  if (auto known = failure()) callback(*known);
  subscribers_.emplace(id, std::move(callback));
  return id;
}

void FailureBoard::unsubscribe(int id) {
  std::lock_guard lock(subscribers_mutex_);
  subscribers_.erase(id);
}

}  // namespace sheaf
