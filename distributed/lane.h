// LaneThread: a thread that runs tasks in the order they were given, concurrently with the compute thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "sheaf/core/event.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

/// The thread belongs to the rank that creates it: it inherits RankContext::current(), which must outlive the lane, and with it
/// flush-to-zero arithmetic. Sleeps while idle.
class LaneThread {
 public:
  LaneThread();
  /// Runs all queued tasks, then joins. Tasks that could block forever must be made to fail first.
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  /// Enqueues `task`; the event completes after it, at the point of a GPU's stream that it returns (null: its work is done), or with
  /// the exception that it threw.
  using Task = std::function<std::shared_ptr<const DevicePoint>()>;
  Event submit(Task task);
  /// True if nothing runs or is queued.
  bool idle() const;
  /// On a lane's thread: how many tasks are queued after the running one.
  static int64_t waiting();

 private:
  void loop(RankContext& context);

  mutable std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::pair<Task, Event>> queue_;
  bool busy_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace sheaf
