#include "sheaf/core/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "sheaf/core/error.h"

namespace sheaf {

AppendFile::AppendFile(std::string who, std::string path) : who_(std::move(who)), path_(std::move(path)) {
  fd_ = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_to("open");
}

AppendFile::~AppendFile() { close(fd_); }

void AppendFile::write(std::string_view record) {
  while (!record.empty()) {
    const ssize_t put = ::write(fd_, record.data(), record.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_to("write");
    record.remove_prefix(static_cast<size_t>(put));
  }
}

void AppendFile::truncate(int64_t bytes) {
  while (ftruncate(fd_, bytes) != 0)
    if (errno != EINTR) fail_to("truncate");
}

void AppendFile::sync() {
  // fsync of a pipe or of /dev/stdout is refused; there is nothing to make durable then.
  if (fsync(fd_) != 0 && errno != EINVAL && errno != EROFS) fail_to("sync");
}

void AppendFile::fail_to(const char* what) const {
  fail<IoError>("[", who_, "] cannot ", what, " '", path_, "': ", std::generic_category().message(errno));
}

}  // namespace sheaf
