// Saving while training continues: a copy of the state is made, and written by a separate thread.
//
//   models::AsyncSaver saver(world);
//   ...
//   saver.save("out/run", step, model, {&optimizer});  // returns when the copy is made
//   saver.check();                                     // now and then: throws an error of the writing
//   ...
//   saver.finish();                                    // committed
//
// The writing thread sends nothing to other ranks: each rank's part is in the pending folder when it is done, and rank 0 commits when
// it sees all of them. So collectives of a step and of a save never mix.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "sheaf/models/model_checkpoint.h"

namespace sheaf::models {

/// One save at a time. Holds a copy of what its rank saves, in host memory, from the first save on. Not thread-safe. Its destructor
/// waits for this rank's part of a save in progress, and abandons the save if other ranks' parts are missing then: a program that
/// ends normally calls finish() before.
class AsyncSaver {
 public:
  explicit AsyncSaver(World& world) : world_(world) {}
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;

  /// As save_checkpoint(), except for when it returns. Waits for the previous save, if that is not over. Collective.
  void save(const std::string& folder, int64_t step, nn::Module& module, const Optimizers& optimizers,
            const SaveOptions& options = {});
  /// Throws the IoError or CheckpointError of this rank's part of a save under way, as soon as there is one.
  void check();
  /// Waits until the last save is committed; throws on all ranks if it cannot be. Collective.
  void finish();

 private:
  enum class Progress : uint8_t { writing, written, over };  ///< this rank's part
  void run(const Json& state, int64_t keep, const std::vector<int64_t>& abandoned);
  bool wait_for_parts() const;
  void advance(Progress to, std::exception_ptr error = nullptr);

  World& world_;
  CheckpointGroup group_;
  PendingCheckpoint pending_;
  std::vector<CheckpointPiece> pieces_;
  HostCopy copy_;
  std::thread thread_;
  std::atomic<bool> given_up_ = false, all_written_ = false;  // what rank 0, which waits for the others' parts, is told
  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  Progress progress_ = Progress::over;
  std::exception_ptr error_;
};

}  // namespace sheaf::models
