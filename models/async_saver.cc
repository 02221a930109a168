#include "sheaf/models/async_saver.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "sheaf/core/rank_context.h"

namespace sheaf::models {

AsyncSaver::~AsyncSaver() {
  given_up_ = true;
  if (thread_.joinable()) thread_.join();
}

void AsyncSaver::save(const std::string& folder, int64_t step, nn::Module& module, const Optimizers& optimizers,
                      const SaveOptions& options) {
  expect_no_recording("AsyncSaver::save");
  check_save(step, options.keep);
  finish();
  group_ = checkpoint_group(module, world_, options.outer, options.also);
  pieces_ = checkpoint_pieces(module, optimizers, options, &copy_);
  pending_ = PendingCheckpoint::begin(folder, step, group_, options.warn);
  given_up_ = all_written_ = false;
  progress_ = Progress::writing;
  thread_ = std::thread([this, &context = RankContext::current(), state = options.state, keep = options.keep, abandoned = options.abandoned] {
    const RankScope scope(context);
    run(state, keep, abandoned);
  });
}

void AsyncSaver::run(const Json& state, int64_t keep, const std::vector<int64_t>& abandoned) {
  try {
    pending_.write(pieces_);
    advance(Progress::written);
    if (pending_.rank == 0) {
      if (wait_for_parts()) pending_.commit(state, keep, abandoned);
    }
    advance(Progress::over);
  } catch (...) {
    advance(Progress::over, std::current_exception());
  }
}

// False if the save is given up. When all ranks say that they have written, this one may still see an old state of the folder.
bool AsyncSaver::wait_for_parts() const {
  std::optional<std::chrono::steady_clock::time_point> see_all_by;
  int next = 0;
  for (auto wait = std::chrono::milliseconds(1); (next = pending_.first_missing(next)) < pending_.world;) {
    const auto now = std::chrono::steady_clock::now();
    if (given_up_) return false;
    if (all_written_ && !see_all_by) see_all_by = now + group_.patience;
    if (see_all_by && now > *see_all_by)
      fail<IoError>("[checkpoint] cannot save '", pending_.target(), "': rank ", next, " has written its part into '", pending_.pending,
                    "', but rank 0 does not see it; do all ranks see the same file system?");
    std::this_thread::sleep_for(wait);
    wait = std::min(2 * wait, std::chrono::milliseconds(100));
  }
  return true;
}

void AsyncSaver::advance(Progress to, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  progress_ = to;
  error_ = std::move(error);
  changed_.notify_all();
}

void AsyncSaver::check() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
  }
  if (error) std::rethrow_exception(error);
}

void AsyncSaver::finish() {
  if (!thread_.joinable()) return;
  bool mine;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return progress_ != Progress::writing; });
    mine = !error_;
  }
  const bool all = group_.all_true(mine);
  (all ? all_written_ : given_up_) = true;
  thread_.join();
  const std::exception_ptr error = std::exchange(error_, nullptr);
  const bool committed = group_.all_true(all && !error);
  if (error) std::rethrow_exception(error);
  if (!committed)
    fail<IoError>("[checkpoint] cannot save '", pending_.target(), "': ",
                  all ? "rank 0 could not commit it" : "another rank could not write its part");
}

}  // namespace sheaf::models
