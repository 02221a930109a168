// Files that appear completely or not at all. Folders: atomic_folder.h.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "sheaf/core/file_lock.h"

namespace sheaf {

/// A new version of the file `path`: written under another name next to it, then renamed. Locked for as long as it lives, so that
/// leftovers of killed processes, which the next new version of `path` removes, differ from files that are being written.
class PendingFile {
 public:
  /// Makes an empty file name(). Throws IoError.
  explicit PendingFile(std::string path);
  /// Removes it, unless it was committed.
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  const std::string& path() const { return path_; }
  /// Where to write: `path`, kPendingMark and a number. Whoever writes syncs.
  const std::string& name() const { return name_; }
  /// Renames it over `path`, and syncs the folder; throws IoError.
  void commit();

 private:
  std::string path_, name_;  // name_ is empty once it is committed
  std::optional<FileLock> lock_;
};

/// Removes new versions of `path` whose processes were killed before they committed them.
void remove_pending_files(const std::string& path);

/// Replaces `path` atomically: `write` gets a PendingFile's name, and writes and syncs that; then it is committed. If `write` throws,
/// `path` is as before.
void replace_file(const std::string& path, const std::function<void(const std::string& pending)>& write);
void replace_file(const std::string& path, std::string_view text);

}  // namespace sheaf
