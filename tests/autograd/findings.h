// The findings of the tape checks, as text for tests to compare.
#pragma once

#include <string>
#include <vector>

#include "sheaf/autograd/checks.h"

namespace sheaf::testing {

/// One line per finding; empty if there are none.
inline std::string all(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& f : findings) out += f.to_string() + "\n";
  return out;
}

}  // namespace sheaf::testing
