// Folders that appear completely or not at all.
//
// [Note: commit by one rename] A new version of folder `x` is built in `x.tmp-<unique>`; every file in it is synced when written, the
// folder is synced, then renamed to `x`, then the parent is synced. That rename is the only commit point: before it a reader sees the
// old state, after it the new one. If `x` exists, the two names are exchanged in one step and the old content, now under the
// temporary name, is removed. Leftovers of a killed process have ".tmp-" in their names, are never read, and are removed with the
// next pending folder. What cannot be removed costs space and is worth a warning, never a run.
//
// A file system without exchange (NFS) takes two steps: `x` is renamed to `x.tmp-old`, then the new version to `x`. If the process is
// killed in between there is no `x`, but `x.tmp-old` is complete: recover_folder() and the next pending folder rename it back. A
// reader that does so while the writer lives only makes it try again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/core/file.h"
#include "sheaf/core/warning.h"

namespace sheaf {

/// Removes leftovers of killed processes in `parent`, and restores folders that they had renamed: only one process at a time may
/// write into it. Does nothing if there is no such folder.
void remove_leftovers(const std::string& parent, const Warn& warn = warn_on_stderr);
/// Makes an empty folder in which to build a new version of `target`, and returns its path: pending_path(). Leftovers of earlier
/// attempts at any folder next to `target` are removed: only one process at a time may write into the parent.
std::string begin_folder(const std::string& target, int64_t tag = fresh_tag(), const Warn& warn = warn_on_stderr);
/// Makes a pending folder, whose files are all synced, the content of `target`. If it throws (IoError), `target` is
/// as before.
void commit_folder(const std::string& pending, const std::string& target, const Warn& warn = warn_on_stderr);
/// If a commit was killed while the old version of `target` was renamed, restores it. Readers of `target` call this first; if
/// renaming is not allowed, or another process was faster, it does nothing.
void recover_folder(const std::string& target);
/// Removes a folder so that it is either complete or gone; warns if it stays.
void remove_folder(const std::string& target, const Warn& warn = warn_on_stderr);

/// Throws IoError unless folders can be made in `parent`, which need not exist yet; leaves nothing in it.
void check_writable(const std::string& parent);

/// "parent/step-<step>".
std::string step_folder(const std::string& parent, int64_t step);
/// The steps of the folders "step-N" in `parent`, also those moved aside, newest first; none if there is no such parent. Throws
/// IoError if it cannot be read.
std::vector<int64_t> list_steps(const std::string& parent);

}  // namespace sheaf
