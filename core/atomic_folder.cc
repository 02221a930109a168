#include "sheaf/core/atomic_folder.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <system_error>

namespace sheaf {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAside = ".tmp-old";

// True for "<any>.tmp-<tag>". Tags of older versions were two numbers, "12-345".
bool is_pending_name(std::string_view name) {
  const size_t mark = name.rfind(kPendingMark);
  if (mark == std::string_view::npos) return false;
  const std::string_view tag = name.substr(mark + kPendingMark.size());
  return !tag.empty() && tag.find_first_not_of("0123456789-") == std::string_view::npos;
}

template <class F>
std::vector<std::string> paths_in(const std::string& parent, F&& wanted) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    if (wanted(it->path().filename().string())) found.push_back(it->path().string());
  }
  if (error) fail<IoError>("[folder] cannot list '", parent, "': ", error.message());
  return found;
}

void remove_tree(const std::string& path, const Warn& warn) {
  std::error_code error(detail::file_fault("remove", path), std::generic_category());
  if (!error) fs::remove_all(path, error);
  if (error) warn(str("[folder] cannot remove '", path, "': ", error.message()));
}

std::string aside_of(const std::string& target) { return str(target, kAside); }

/// Exchanges two names in one step; false where the file system cannot.
bool exchange_paths(const std::string& a, const std::string& b) {
  int error = detail::file_fault("exchange", b);
  if (!error && renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0) error = errno;
  if (error && error != EINVAL && error != ENOSYS)
    fail<IoError>("[folder] cannot exchange '", a, "' and '", b, "': ", std::generic_category().message(error));
  return !error;
}

/// Replaces `target` in two steps.
void replace_by_two_renames(const std::string& pending, const std::string& target) {
  constexpr int kMostTries = 100;
  for (int tries = 1;; ++tries) {
    rename_path(target, aside_of(target));
    try {
      return rename_path(pending, target);
    } catch (const IoError&) {
      const bool restored_by_a_reader = path_exists(target);
      recover_folder(target);
      if (!restored_by_a_reader || tries == kMostTries) throw;
    }
  }
}

}  // namespace

void remove_leftovers(const std::string& parent, const Warn& warn) {
  if (!path_exists(parent)) return;
  for (const std::string& aside : paths_in(parent, [](const std::string& name) { return name.ends_with(kAside); })) {
    const std::string old = aside.substr(0, aside.size() - kAside.size());
    recover_folder(old);
    if (path_exists(old) && path_exists(aside)) remove_folder(aside, warn);  // already replaced
  }
  for (const std::string& stale : paths_in(parent, is_pending_name)) remove_tree(stale, warn);
}

std::string begin_folder(const std::string& target, int64_t tag, const Warn& warn) {
  make_folders(parent_of(target));
  remove_leftovers(parent_of(target), warn);
  const std::string pending = pending_path(target, tag);
  make_folders(pending);
  return pending;
}

void commit_folder(const std::string& pending, const std::string& target, const Warn& warn) {
  sync_folder(pending);
  if (!path_exists(target)) {
    rename_path(pending, target);
    return sync_folder(parent_of(target));
  }
  const bool exchanged = exchange_paths(pending, target);
  if (!exchanged) replace_by_two_renames(pending, target);
  sync_folder(parent_of(target));
  if (exchanged) remove_tree(pending, warn);
  else remove_folder(aside_of(target), warn);
}

void recover_folder(const std::string& target) {
  if (!path_exists(target)) std::rename(aside_of(target).c_str(), target.c_str());
}

void remove_folder(const std::string& target, const Warn& warn) {
  const std::string aside = pending_path(target, fresh_tag());
  try {
    rename_path(target, aside);
  } catch (const IoError& error) {
    return warn(error.what());
  }
  remove_tree(aside, warn);
}

void check_writable(const std::string& parent) {
  const bool fresh = !path_exists(parent);
  const std::string probe = pending_path(parent + "/probe", fresh_tag());
  make_folders(parent);
  detail::file_fault_point("mkdir", probe);
  std::error_code error;
  fs::create_directory(probe, error);
  if (error) fail<IoError>("[folder] cannot write into '", parent, "': ", error.message());
  remove_tree(probe, warn_on_stderr);
  if (fresh) fs::remove(parent, error);
}

std::string step_folder(const std::string& parent, int64_t step) { return str(parent, "/step-", step); }

std::vector<int64_t> list_steps(const std::string& parent) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (!name.starts_with("step-")) continue;
    if (name.ends_with(kAside)) name.resize(name.size() - kAside.size());
    int64_t step = -1;
    std::from_chars(name.data() + 5, name.data() + name.size(), step);
    // Only names that step_folder() gives, so that a step never has two folders.
    std::error_code unreadable;
    if (step >= 0 && name == str("step-", step) && it->is_directory(unreadable)) steps.push_back(step);
  }
  if (error && error != std::errc::no_such_file_or_directory)
    fail<IoError>("[folder] cannot list '", parent, "': ", error.message());
  std::sort(steps.rbegin(), steps.rend());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

}  // namespace sheaf
