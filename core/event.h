// Event: the completion of work that runs on another lane. `sync()` blocks the host until it is done and rethrows what
// went wrong there; nothing else is called wait.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace sheaf {

class Event {
 public:
  Event() = default;  ///< already complete
  static Event pending() { Event e; e.state_ = std::make_shared<State>(); return e; }

  void sync() const {
    if (!state_) return;
    std::unique_lock lock(state_->mutex);
    state_->condition.wait(lock, [&] { return state_->done; });
    if (state_->failure) std::rethrow_exception(state_->failure);
  }
  bool ready() const {
    if (!state_) return true;
    std::lock_guard lock(state_->mutex);
    return state_->done;
  }
  /// Called once by the lane that does the work.
  void complete(std::exception_ptr failure = nullptr) const {
    { std::lock_guard lock(state_->mutex); state_->done = true; state_->failure = std::move(failure); }
    state_->condition.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable condition;
    bool done = false;
    std::exception_ptr failure;
  };
  std::shared_ptr<State> state_;
};

}  // namespace sheaf
