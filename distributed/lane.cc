#include "sheaf/distributed/lane.h"

#include <utility>

namespace sheaf {

LaneThread::LaneThread() : thread_([this, &context = RankContext::current()] { loop(context); }) {}

LaneThread::~LaneThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  condition_.notify_all();
  thread_.join();
}

Event LaneThread::submit(Task task) {
  Event event = Event::pending();
  {
    std::lock_guard lock(mutex_);
    queue_.emplace_back(std::move(task), event);
  }
  condition_.notify_one();
  return event;
}

bool LaneThread::idle() const {
  std::lock_guard lock(mutex_);
  return !busy_ && queue_.empty();
}

namespace {

thread_local LaneThread* running = nullptr;

}  // namespace

int64_t LaneThread::waiting() {
  if (!running) return 0;
  std::lock_guard lock(running->mutex_);
  return std::ssize(running->queue_);
}

void LaneThread::loop(RankContext& context) {
  running = this;
  RankScope scope(context);
  while (true) {
    std::pair<Task, Event> entry;
    {
      std::unique_lock lock(mutex_);
      condition_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    std::exception_ptr failure;
    std::shared_ptr<const DevicePoint> point;
    try {
      point = entry.first();
    } catch (...) {
      failure = std::current_exception();
    }
    entry.first = nullptr;  // what the task owns is released before its completion is visible
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
    }
    entry.second.complete(failure, std::move(point));
  }
}

}  // namespace sheaf
