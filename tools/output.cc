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

}  // namespace sheaf::tools
