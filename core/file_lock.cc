#include "sheaf/core/file_lock.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "sheaf/core/error.h"

namespace sheaf {

FileLock::FileLock(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  if (fd_ < 0) fail<IoError>("[file] cannot open '", path, "': ", std::strerror(errno));
  while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    state_ = errno == EWOULDBLOCK ? State::elsewhere : State::impossible;
    return;
  }
}

FileLock::~FileLock() { close(fd_); }

}  // namespace sheaf
