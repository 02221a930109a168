// A folder for one test, removed at its end.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "sheaf/core/error.h"

namespace sheaf {

class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = ::testing::TempDir() + "/sheaf-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Runs `f` and returns the message of the E that it throws, which must carry `code`; otherwise a failure message.
template <class E, class F>
std::string message_of(ExitCode code, F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.exit_code() == static_cast<int>(code) ? error.what() : "wrong exit code";
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "no exception";
}

}  // namespace sheaf
