#include "sheaf/core/atomic_file.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "sheaf/core/file.h"

namespace sheaf {

PendingFile::PendingFile(std::string path) : path_(std::move(path)) {
  remove_pending_files(path_);
  // Again if another process took it for a leftover before it was locked.
  do {
    name_ = pending_path(path_, fresh_tag());
    lock_.emplace(name_);
  } while (lock_->state() == FileLock::State::elsewhere || !path_exists(name_));
}

PendingFile::~PendingFile() {
  if (!name_.empty()) unlink(name_.c_str());
}

void PendingFile::commit() {
  rename_path(name_, path_);
  name_.clear();
  sync_folder(parent_of(path_));
}

void remove_pending_files(const std::string& path) {
  const std::string prefix = std::filesystem::path(path).filename().string() + std::string(kPendingMark);
  std::error_code error;
  for (std::filesystem::directory_iterator it(parent_of(path), error), end; !error && it != end; it.increment(error)) {
    const std::string found = it->path().string(), name = it->path().filename().string();
    if (!name.starts_with(prefix) || name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) continue;
    if (std::error_code unreadable; !it->is_regular_file(unreadable) || access(found.c_str(), W_OK) != 0) continue;
    if (FileLock(found).state() == FileLock::State::taken) unlink(found.c_str());
  }
}

void replace_file(const std::string& path, const std::function<void(const std::string&)>& write) {
  PendingFile pending(path);
  write(pending.name());
  pending.commit();
}

void replace_file(const std::string& path, std::string_view text) {
  replace_file(path, [&](const std::string& pending) { write_file(pending, text); });
}

}  // namespace sheaf
