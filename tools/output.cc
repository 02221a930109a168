#include "sheaf/tools/output.h"

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "sheaf/core/error.h"

namespace sheaf::tools {

void put(std::string_view text) {
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (written && !std::ferror(stdout)) return;
  fail<IoError>("[output] cannot write to standard output: ", std::generic_category().message(errno ? errno : EIO));
}

std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", value >= 10 ? 0 : value >= 1 ? 1 : value >= 0.1 ? 2 : 3, value);
  return text;
}

std::string counted(int64_t count, std::string_view what) { return str(count, ' ', what, count == 1 ? "" : "s"); }

std::string mebibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace sheaf::tools
