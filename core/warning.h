// What went wrong without ending anything.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace sheaf {

/// Is given one line of text. It may be called from another thread than the one that passed it, but from one at a time.
using Warn = std::function<void(const std::string& warning)>;

/// The same, for callers that are several threads: they take turns.
inline Warn one_at_a_time(Warn warn) {
  return [warn = std::move(warn), turn = std::make_shared<std::mutex>()](const std::string& warning) {
    const std::lock_guard lock(*turn);
    warn(warning);
  };
}

/// Writes "sheaf: warning: ..." to standard error: the default.
inline void warn_on_stderr(const std::string& warning) { std::fprintf(stderr, "sheaf: warning: %s\n", warning.c_str()); }

}  // namespace sheaf
