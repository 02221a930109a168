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

Event LaneThread::submit(std::function<void()> task) {
  Event event = Event::pending();
  {
    std::lock_guard lock(mutex_);
    queue_.emplace_back(std::move(task), event);
  }
  condition_.notify_one();
  return event;
}

void LaneThread::loop(RankContext& context) {
  RankScope scope(context);
  while (true) {
    std::pair<std::function<void()>, Event> entry;
    {
      std::unique_lock lock(mutex_);
      condition_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr failure;
    try {
      entry.first();
    } catch (...) {
      failure = std::current_exception();
    }
    entry.first = nullptr;  // what the task holds is released before anybody hears of its end
    entry.second.complete(failure);
  }
}

}  // namespace sheaf
