// Folders that appear whole or not at all.
//
// [Note: commit by one rename] A new version of folder `x` is built in `x.tmp-<unique>`; every file in it is synced when
// written, the folder is synced, then renamed to `x`, then the parent is synced. That rename is the only commit point:
// before it a reader sees the old state, after it the new one. If `x` exists, the two names are exchanged in one step
// and the old content, now under the temporary name, is removed. What a killed process leaves behind has a name with
// ".tmp-" in it, is never read, and goes away with the next pending folder.
//
// A file system without exchange (NFS) takes two steps: `x` is moved aside to `x.tmp-old`, then the new version takes its
// place. After a kill between them there is no `x`, but `x.tmp-old` is whole: recover_folder() and the next pending
// folder put it back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sheaf {

/// Removes what killed processes have left in `parent`, and puts back what they had aside: only one process at a time may write
/// into it. Nothing where there is no such folder.
void remove_leftovers(const std::string& parent);
/// Makes an empty folder in which to build a new version of `target`, and returns its path. Leftovers of earlier
/// attempts at any folder next to `target` are removed: only one process at a time may write into the parent.
std::string begin_folder(const std::string& target);
/// The one pending folder of `target` that another process has begun; throws IoError if there is none or several.
std::string pending_folder(const std::string& target);
/// Makes a pending folder, whose files are all synced, the content of `target`. If it throws (IoError), `target` is
/// as before.
void commit_folder(const std::string& pending, const std::string& target);
/// If a commit was killed while the old version of `target` was aside, puts it back. Readers of `target` call this
/// first; where renaming is not allowed, or somebody else was faster, it does nothing.
void recover_folder(const std::string& target);
/// Removes a folder so that it is either there whole or gone.
void remove_folder(const std::string& target);

/// Throws IoError unless folders can be made in `parent`, which need not exist yet; leaves nothing in it.
void check_writable(const std::string& parent);

/// "parent/step-<step>".
std::string step_folder(const std::string& parent, int64_t step);
/// The steps of the folders "step-N" in `parent`, also those moved aside, newest first; none if there is no such parent. Throws
/// IoError if it cannot be read.
std::vector<int64_t> list_steps(const std::string& parent);

}  // namespace sheaf
