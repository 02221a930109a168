#include "sheaf/core/error.h"

#include <cstdio>

namespace sheaf::detail {

void append(std::string& out, double part) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", part);
  out += buffer;
}

}  // namespace sheaf::detail
