// Event: the completion of work that runs on another lane. `sync()` blocks the host until it is done and rethrows its errors;
// `order(stream)` makes a GPU's stream continue only after it.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "sheaf/core/device.h"
#include "sheaf/core/profile.h"

namespace sheaf {

/// A point in the order of a GPU's stream.
class DevicePoint {
 public:
  virtual ~DevicePoint() = default;
  virtual void sync() const = 0;
  virtual bool reached() const = 0;
  /// Work enqueued on `stream` from now on runs after this point.
  virtual void order(const Stream& stream) const = 0;
};

class Event {
 public:
  Event() = default;  ///< already complete
  static Event pending() { Event e; e.state_ = std::make_shared<State>(); return e; }
  static Event at(std::shared_ptr<const DevicePoint> point) { Event e = pending(); e.complete(nullptr, std::move(point)); return e; }

  void sync() const {
    if (!state_) return;
    settle();
    if (state_->point) state_->point->sync();
  }
  /// Blocks the host only until the work is enqueued on its GPU, or, for the host's own work, until it is done.
  void order(const Stream& stream) const {
    if (!state_) return;
    settle();
    if (!state_->point) return;
    const ProfileSpan waits(Profile::kCompute, "waits", {}, &stream);
    state_->point->order(stream);
  }
  /// The point in the device's order, once the work is enqueued there; null if the host does the work.
  std::shared_ptr<const DevicePoint> point() const {
    if (!state_) return nullptr;
    settle();
    return state_->point;
  }
  bool ready() const {
    if (!state_) return true;
    std::lock_guard lock(state_->mutex);
    return state_->done && (!state_->point || state_->point->reached());
  }
  /// Called once by the lane that does the work or enqueues it on a GPU; in that case it is done at `point`.
  void complete(std::exception_ptr failure = nullptr, std::shared_ptr<const DevicePoint> point = nullptr) const {
    {
      std::lock_guard lock(state_->mutex);
      state_->done = true;
      state_->failure = std::move(failure);
      state_->point = std::move(point);
    }
    state_->condition.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable condition;
    bool done = false;
    std::exception_ptr failure;
    std::shared_ptr<const DevicePoint> point;
  };
  bool done() const {
    std::lock_guard lock(state_->mutex);
    return state_->done;
  }
  void settle() const {
    if (!done()) {
      const ProfileSpan waits(Profile::kCompute, "waits", {});
      std::unique_lock lock(state_->mutex);
      state_->condition.wait(lock, [&] { return state_->done; });
    }
    if (state_->failure) std::rethrow_exception(state_->failure);
  }
  std::shared_ptr<State> state_;
};

}  // namespace sheaf
