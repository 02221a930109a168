#include "sheaf/core/error.h"

#include <cstdio>

namespace sheaf {

void Error::locate(std::string_view path, int rank, int ranks) {
  if (!located_.empty()) return;
  const std::string message = what();
  const bool has_path = path.empty() || message.find(path) != std::string::npos;
  const bool has_rank = ranks == 1 || message.find(str("rank ", rank)) != std::string::npos;
  if (has_path && has_rank) return;
  located_ = str(message, " (", has_path ? "" : "in ", has_path ? "" : path, has_path || has_rank ? "" : ", ",
                 has_rank ? "" : str("rank ", rank), ')');
}

void detail::append(std::string& out, double part) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", part);
  out += buffer;
}

}  // namespace sheaf
