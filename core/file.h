// Files: whole reads and writes, durable, with errors that name the path. Everything that a checkpoint consists of goes
// through FileWriter and the functions of this file, so a test can fail or kill the process at each system call that matters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "sheaf/core/error.h"

namespace sheaf {

/// A read-only map of a regular file; empty for an empty file. Move-only.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const std::byte* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& o) noexcept;
  Mapping& operator=(Mapping&& o) noexcept;
  ~Mapping();

  const std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), static_cast<size_t>(bytes_)}; }
  /// Releases the resident pages of [begin, end), so that a scan of a large file does not count as memory in use.
  void release(int64_t begin, int64_t end) const;

 private:
  const std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// A regular file open for reading. Thread-safe: each read takes an offset.
class File {
 public:
  File() = default;
  File(File&& o) noexcept;
  File& operator=(File&& o) noexcept;
  ~File();

  /// Opens `path`; throws E (IoError, or what a missing file means to the caller) if it is missing or not a regular file: devices and
  /// pipes are refused without being read. IoError if it is there and cannot be opened, which may pass: too many are open, for instance.
  template <class E = IoError>
  static File open(const std::string& path) {
    std::string reason;
    File file = try_open(path, reason);
    if (!reason.empty()) fail<E>("[file] cannot open '", path, "': ", reason);
    return file;
  }

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Copies bytes [offset, offset + bytes); throws IoError, also if the file ends too early.
  void read_at(int64_t offset, void* dst, int64_t bytes) const;
  std::string read_all() const;
  Mapping map() const;

 private:
  static File try_open(const std::string& path, std::string& reason);
  std::string path_;
  int64_t size_ = 0;
  int fd_ = -1;
};

/// XXH3-128 with seed 0 of bytes that arrive in pieces.
class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  ContentHash(const ContentHash&) = delete;
  ContentHash& operator=(const ContentHash&) = delete;

  void update(const void* data, int64_t bytes);
  /// In hex, of the bytes that have arrived so far.
  std::string digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Size and content of a file. `xxh3` is XXH3-128 with seed 0 in hex, as `xxh128sum` prints it.
struct FileDigest {
  int64_t bytes = 0;
  std::string xxh3;
  bool operator==(const FileDigest&) const = default;
};
FileDigest digest_of_text(std::string_view text);
/// Reads the file once in blocks of 1 MiB; throws IoError.
FileDigest digest_of_file(const File& file);
inline FileDigest digest_of_file(const std::string& path) { return digest_of_file(File::open(path)); }

/// Writes a new file (an old one of that name is truncated) and computes its digest on the way. Nothing is promised
/// about the content until finish() has returned.
class FileWriter {
 public:
  explicit FileWriter(const std::string& path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, int64_t bytes);
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  /// Syncs and closes; throws IoError if any byte may not have reached the disk.
  FileDigest finish();

 private:
  std::string path_;
  int fd_ = -1;
  int64_t bytes_ = 0;
  ContentHash hash_;
};

/// Writes `path` and syncs it; not atomic: for files inside a folder that is committed by a rename.
FileDigest write_file(const std::string& path, std::string_view text);

/// In the names of files and folders that are not complete yet.
inline constexpr std::string_view kPendingMark = ".tmp-";
/// A number for such a name that no other one has.
int64_t fresh_tag();
/// The name of a new version of `path`, until it is complete: `path`, kPendingMark and the tag.
std::string pending_path(const std::string& path, int64_t tag);

/// Throws IoError if no file `path` could be replaced: it is empty, a folder, a device or a pipe, or its own folder is missing or takes
/// no files. For commands that write last, after hours of work; `who` begins the message.
void expect_writable_file(const char* who, const std::string& path);

/// fsync of a folder, so that the names in it survive a crash.
void sync_folder(const std::string& path);
/// rename(2).
void rename_path(const std::string& from, const std::string& to);
/// Makes `path` and its parents, whose names survive a crash; no error if they exist.
void make_folders(const std::string& path);
bool path_exists(const std::string& path);
/// The part before the last '/', "." if there is none.
std::string parent_of(const std::string& path);

namespace testing {
/// Called before every system call that changes files ("open", "write", "sync", "rename", "exchange", "mkdir",
/// "remove"), when a file is opened to be read ("read"), and when a rank looks for another's file ("look"). A test returns an errno
/// value to fail the call, or ends the process. Null outside tests.
using FileFault = int (*)(const char* operation, const char* path);
void set_file_fault(FileFault fault);
}  // namespace testing

namespace detail {
/// Asks the hook above: the errno value that it injects, or 0.
int file_fault(const char* operation, const std::string& path);
/// As file_fault(), but throws IoError for what it injects.
void file_fault_point(const char* operation, const std::string& path);
}  // namespace detail

}  // namespace sheaf
