// FileLock: at most one process at a time does something that a file stands for.
#pragma once

#include <string>

namespace sheaf::models {

/// flock(2) on a file, which is created if missing and stays afterwards. Released by the destructor, or when the
/// process ends, however it ends.
class FileLock {
 public:
  enum class State {
    taken,
    elsewhere,   ///< somebody else has it
    impossible,  ///< the file system knows no locks: nothing is locked
  };

  /// Does not wait. Throws IoError where the file cannot be made.
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  State state() const { return state_; }

 private:
  int fd_ = -1;
  State state_ = State::taken;
};

}  // namespace sheaf::models
