#include "sheaf/core/atomic_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "sheaf/core/file.h"

namespace sheaf {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = ".tmp-";

std::string file_name(const std::string& path) { return fs::path(path).filename().string(); }

// True for "<stem>.tmp-<digits>-<digits>"; an empty stem matches any.
bool is_pending_name(std::string_view name, std::string_view stem) {
  const size_t mark = name.rfind(kMark);
  if (mark == std::string_view::npos || (!stem.empty() && name.substr(0, mark) != stem)) return false;
  const std::string_view tag = name.substr(mark + kMark.size());
  return !tag.empty() && tag.find_first_not_of("0123456789-") == std::string_view::npos;
}

std::vector<std::string> pending_in(const std::string& parent, std::string_view stem) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    if (is_pending_name(it->path().filename().string(), stem)) found.push_back(it->path().string());
  }
  if (error) fail<IoError>("[folder] cannot list '", parent, "': ", error.message());
  return found;
}

void remove_tree(const std::string& path) {
  detail::file_fault_point("remove", path);
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail<IoError>("[folder] cannot remove '", path, "': ", error.message());
}

std::string fresh_name(const std::string& target) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return str(target, kMark, getpid(), '-', now);
}

}  // namespace

std::string begin_folder(const std::string& target) {
  const std::string parent = parent_of(target);
  make_folders(parent);
  for (const std::string& stale : pending_in(parent, "")) remove_tree(stale);
  const std::string pending = fresh_name(target);
  make_folders(pending);
  return pending;
}

std::string pending_folder(const std::string& target) {
  const auto found = pending_in(parent_of(target), file_name(target));
  if (found.size() != 1) {
    fail<IoError>("[folder] ", found.size(), " folders '", target, kMark, "*' where exactly one was expected; do all ",
                  "ranks see the same file system?");
  }
  return found[0];
}

void commit_folder(const std::string& pending, const std::string& target) {
  sync_folder(pending);
  bool replaced = path_exists(target);
  if (replaced) {
    detail::file_fault_point("rename", target);
    if (renameat2(AT_FDCWD, pending.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
      if (errno != EINVAL && errno != ENOSYS) {
        fail<IoError>("[folder] cannot exchange '", pending, "' and '", target,
                      "': ", std::generic_category().message(errno));
      }
      // A file system without exchange: the old version goes aside first.
      const std::string aside = fresh_name(target);
      rename_path(target, aside);
      rename_path(pending, target);
      sync_folder(parent_of(target));
      remove_tree(aside);
      return;
    }
  } else {
    rename_path(pending, target);
  }
  sync_folder(parent_of(target));
  if (replaced) remove_tree(pending);
}

void remove_folder(const std::string& target) {
  const std::string aside = fresh_name(target);
  rename_path(target, aside);
  remove_tree(aside);
}

void check_writable(const std::string& parent) {
  const bool fresh = !path_exists(parent);
  const std::string probe = fresh_name(parent + "/probe");
  make_folders(parent);
  detail::file_fault_point("mkdir", probe);
  std::error_code error;
  fs::create_directory(probe, error);
  if (error) fail<IoError>("[folder] cannot write into '", parent, "': ", error.message());
  remove_tree(probe);
  if (fresh) fs::remove(parent, error);
}

std::string step_folder(const std::string& parent, int64_t step) { return str(parent, "/step-", step); }

std::vector<int64_t> list_steps(const std::string& parent) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("step-")) continue;
    int64_t step = -1;
    std::from_chars(name.data() + 5, name.data() + name.size(), step);
    // Only names that we would give ourselves, so that a step never has two folders.
    std::error_code unreadable;
    if (step >= 0 && name == str("step-", step) && it->is_directory(unreadable)) steps.push_back(step);
  }
  if (error && error != std::errc::no_such_file_or_directory)
    fail<IoError>("[folder] cannot list '", parent, "': ", error.message());
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

}  // namespace sheaf
