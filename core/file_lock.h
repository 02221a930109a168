// FileLock: lets at most one process at a time use what a file represents.
#pragma once

#include <string>

namespace sheaf {

/// flock(2) on a file, which is created if missing and stays afterwards. Released by the destructor, or when the process ends in any
/// way.
class FileLock {
 public:
  enum class State {
    taken,
    elsewhere,   ///< another process has it
    impossible,  ///< the file system does not support locks: nothing is locked
  };

  /// Does not wait. Throws IoError if the file cannot be created.
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  State state() const { return state_; }

 private:
  int fd_ = -1;
  State state_ = State::taken;
};

}  // namespace sheaf
