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
constexpr std::string_view kAside = ".tmp-old";

std::string file_name(const std::string& path) { return fs::path(path).filename().string(); }

// True for "<stem>.tmp-<digits>-<digits>"; an empty stem matches any.
bool is_pending_name(std::string_view name, std::string_view stem) {
  const size_t mark = name.rfind(kMark);
  if (mark == std::string_view::npos || (!stem.empty() && name.substr(0, mark) != stem)) return false;
  const std::string_view tag = name.substr(mark + kMark.size());
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

std::vector<std::string> pending_in(const std::string& parent, std::string_view stem) {
  return paths_in(parent, [&](const std::string& name) { return is_pending_name(name, stem); });
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

std::string aside_of(const std::string& target) { return str(target, kAside); }

/// Exchanges two names in one step; false where the file system cannot.
bool exchange_paths(const std::string& a, const std::string& b) {
  int error = detail::file_fault("exchange", b);
  if (!error && renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0) error = errno;
  if (error && error != EINVAL && error != ENOSYS)
    fail<IoError>("[folder] cannot exchange '", a, "' and '", b, "': ", std::generic_category().message(error));
  return !error;
}

}  // namespace

void remove_leftovers(const std::string& parent) {
  if (!path_exists(parent)) return;
  for (const std::string& aside : paths_in(parent, [](const std::string& name) { return name.ends_with(kAside); })) {
    const std::string old = aside.substr(0, aside.size() - kAside.size());
    if (path_exists(old)) remove_folder(aside);  // already replaced
    else rename_path(aside, old);
  }
  for (const std::string& stale : pending_in(parent, "")) remove_tree(stale);
}

std::string begin_folder(const std::string& target) {
  make_folders(parent_of(target));
  remove_leftovers(parent_of(target));
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
  const bool replaced = path_exists(target);
  if (replaced && !exchange_paths(pending, target)) {
    const std::string aside = aside_of(target);
    rename_path(target, aside);
    try {
      rename_path(pending, target);
    } catch (const IoError&) {
      recover_folder(target);
      throw;
    }
    sync_folder(parent_of(target));
    remove_folder(aside);
    return;
  }
  if (!replaced) rename_path(pending, target);
  sync_folder(parent_of(target));
  if (replaced) remove_tree(pending);
}

void recover_folder(const std::string& target) {
  if (!path_exists(target)) std::rename(aside_of(target).c_str(), target.c_str());
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
