// AppendFile: a log, which grows by whole records.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sheaf {

/// Not thread-safe.
class AppendFile {
 public:
  /// Opens `path`, or makes it. All errors are IoError, in the name of `who`.
  AppendFile(std::string who, std::string path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  /// With one system call where the file system allows it, so that a kill leaves whole records.
  void write(std::string_view record);
  /// Drops everything after the first `bytes`.
  void truncate(int64_t bytes);
  /// Everything written so far is on the disk when it returns.
  void sync();

 private:
  [[noreturn]] void fail_to(const char* what) const;

  std::string who_, path_;
  int fd_ = -1;
};

}  // namespace sheaf
