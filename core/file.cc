#include "sheaf/core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "sheaf/core/mapped_files.h"

namespace sheaf {
namespace {

// One write(2) moves at most 2^31 - 4096 bytes; smaller pieces also let a signal through.
constexpr int64_t kMaxCall = int64_t{1} << 30;

std::string reason_of(int error) { return std::generic_category().message(error); }

[[noreturn]] void io_failure(const char* what, const std::string& path, int error) {
  fail<IoError>("[file] cannot ", what, " '", path, "': ", reason_of(error));
}

// There is no such file: not here now, and not later.
bool is_of_the_path(int error) { return error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG || error == ELOOP; }

std::string hex(XXH128_hash_t hash) {
  char out[33];
  std::snprintf(out, sizeof out, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return out;
}

std::atomic<testing::FileFault> fault_hook{nullptr};

}  // namespace

void testing::set_file_fault(FileFault fault) { fault_hook = fault; }

int detail::file_fault(const char* operation, const std::string& path) {
  const auto hook = fault_hook.load(std::memory_order_relaxed);
  return hook ? hook(operation, path.c_str()) : 0;
}

void detail::file_fault_point(const char* operation, const std::string& path) {
  if (const int error = file_fault(operation, path)) io_failure(operation, path, error);
}

Mapping::Mapping(Mapping&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
Mapping& Mapping::operator=(Mapping&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}
Mapping::~Mapping() {
  if (!data_) return;
  detail::forget_mapping(data_);
  munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

void Mapping::release(int64_t begin, int64_t end) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  begin = (begin + page - 1) / page * page;
  end = end >= bytes_ ? bytes_ : end / page * page;
  if (begin < end) {
    madvise(const_cast<std::byte*>(data_) + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
  }
}

File::File(File&& o) noexcept
    : path_(std::move(o.path_)), size_(std::exchange(o.size_, 0)), fd_(std::exchange(o.fd_, -1)) {}
File& File::operator=(File&& o) noexcept {
  std::swap(path_, o.path_);
  std::swap(size_, o.size_);
  std::swap(fd_, o.fd_);
  return *this;
}
File::~File() {
  if (fd_ >= 0) close(fd_);
}

File File::try_open(const std::string& path, std::string& reason) {
  File file;
  file.path_ = path;
  int error = detail::file_fault("read", path);
  // O_NONBLOCK: opening a pipe must not hang before it is found to be one.
  while (!error && (file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) < 0)
    if (errno != EINTR) error = errno;
  struct stat status {};
  if (!error && fstat(file.fd_, &status) != 0) error = errno;
  if (error && !is_of_the_path(error)) io_failure("open", path, error);
  if (error) {
    reason = reason_of(error);
  } else if (S_ISDIR(status.st_mode)) {
    reason = "it is a folder";
  } else if (!S_ISREG(status.st_mode)) {
    reason = "it is not a regular file";
  } else {
    file.size_ = status.st_size;
  }
  return file;
}

void File::read_at(int64_t offset, void* dst, int64_t bytes) const {
  auto* out = static_cast<char*>(dst);
  while (bytes > 0) {
    const ssize_t got = pread(fd_, out, static_cast<size_t>(std::min(bytes, kMaxCall)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) io_failure("read", path_, errno);
    if (got == 0) fail<IoError>("[file] '", path_, "' ends at byte ", offset, ", ", bytes, " bytes too early");
    out += got;
    offset += got;
    bytes -= got;
  }
}

std::string File::read_all() const {
  std::string text(static_cast<size_t>(size_), '\0');
  read_at(0, text.data(), size_);
  return text;
}

Mapping File::map() const {
  if (size_ == 0) return {};
  void* data = mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) io_failure("map", path_, errno);
  detail::note_mapping(data, static_cast<size_t>(size_), path_);
  return {static_cast<const std::byte*>(data), size_};
}

struct ContentHash::State : std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> {
  using unique_ptr::unique_ptr;
};

ContentHash::ContentHash() : state_(std::make_unique<State>(XXH3_createState(), XXH3_freeState)) {
  XXH3_128bits_reset(state_->get());
}
ContentHash::~ContentHash() = default;

void ContentHash::update(const void* data, int64_t bytes) {
  XXH3_128bits_update(state_->get(), data, static_cast<size_t>(bytes));
}

std::string ContentHash::digest() const { return hex(XXH3_128bits_digest(state_->get())); }

FileDigest digest_of_text(std::string_view text) {
  return {static_cast<int64_t>(text.size()), hex(XXH3_128bits(text.data(), text.size()))};
}

FileDigest digest_of_file(const File& file) {
  std::vector<char> block(static_cast<size_t>(std::min<int64_t>(file.size(), 1 << 20)));
  ContentHash hash;
  for (int64_t at = 0; at < file.size();) {
    const int64_t n = std::min<int64_t>(file.size() - at, static_cast<int64_t>(block.size()));
    file.read_at(at, block.data(), n);
    hash.update(block.data(), n);
    at += n;
  }
  return {file.size(), hash.digest()};
}

FileWriter::FileWriter(const std::string& path) : path_(path) {
  detail::file_fault_point("open", path_);
  do fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) io_failure("create", path_, errno);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) close(fd_);
}

void FileWriter::write(const void* data, int64_t bytes) {
  detail::file_fault_point("write", path_);
  hash_.update(data, bytes);
  auto* in = static_cast<const char*>(data);
  bytes_ += bytes;
  while (bytes > 0) {
    const ssize_t put = ::write(fd_, in, static_cast<size_t>(std::min(bytes, kMaxCall)));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) io_failure("write", path_, errno);
    in += put;
    bytes -= put;
  }
}

FileDigest FileWriter::finish() {
  detail::file_fault_point("sync", path_);
  if (fsync(fd_) != 0) io_failure("sync", path_, errno);
  if (close(std::exchange(fd_, -1)) != 0) io_failure("close", path_, errno);
  return {bytes_, hash_.digest()};
}

FileDigest write_file(const std::string& path, std::string_view text) {
  FileWriter writer(path);
  writer.write(text);
  return writer.finish();
}

int64_t fresh_tag() {
  std::random_device random;
  return static_cast<int64_t>((uint64_t{random()} << 31) ^ random());
}

std::string pending_path(const std::string& path, int64_t tag) { return str(path, kPendingMark, tag); }

void expect_writable_file(const char* who, const std::string& path) {
  check<IoError>(!path.empty(), "[", who, "] '' cannot be the name of a file");
  std::error_code unreadable;
  if (path.ends_with('/') || std::filesystem::is_directory(path, unreadable)) fail<IoError>("[", who, "] '", path, "' is a folder");
  if (path_exists(path) && !std::filesystem::is_regular_file(path, unreadable))
    fail<IoError>("[", who, "] '", path, "' is a device or a pipe, and files are replaced whole");
  if (access(parent_of(path).c_str(), W_OK) != 0) fail<IoError>("[", who, "] cannot write '", path, "': ", reason_of(errno));
}

void sync_folder(const std::string& path) {
  detail::file_fault_point("sync", path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) io_failure("open folder", path, errno);
  const int error = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  // Some file systems cannot sync folders and say so; their renames are then as durable as they get.
  if (error && error != EINVAL && error != EROFS) io_failure("sync folder", path, error);
}

void rename_path(const std::string& from, const std::string& to) {
  detail::file_fault_point("rename", to);
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    fail<IoError>("[file] cannot rename '", from, "' to '", to, "': ", reason_of(errno));
  }
}

void make_folders(const std::string& path) {
  detail::file_fault_point("mkdir", path);
  std::vector<std::string> fresh;
  for (std::string folder = path; !path_exists(folder); folder = parent_of(folder)) fresh.push_back(folder);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  // Some versions report a symbolic link to a folder as an error although it works.
  std::error_code unreadable;
  if (error && !std::filesystem::is_directory(path, unreadable)) io_failure("make folder", path, error.value());
  for (const std::string& folder : fresh)  // what may not be read cannot be synced
    if (access(parent_of(folder).c_str(), R_OK) == 0) sync_folder(parent_of(folder));
}

bool path_exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace sheaf
