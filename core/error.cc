#include "sheaf/core/error.h"

#include <cstdio>

namespace sheaf {

Error::~Error() = default;

void Error::locate(std::string_view path, int rank, int ranks) {
  if (!located_.empty()) return;
  const std::string message = what();
  // As "[op] path: .." or in quotes, perhaps with what is in it: a module may be called like any word of the message ("input", "a").
  const auto says = [&](std::string_view begin, std::string_view end) { return message.find(str(begin, path, end)) != std::string::npos; };
  const bool has_path = path.empty() || says("] ", ": ") || says("'", "'") || says("'", ".");
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
