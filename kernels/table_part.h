// The rows of a table, such as a vocabulary, that a rank computes with if ranks share it.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// Rows [first, first + n) of `all`, where n is the number of rows in the rank's view.
struct TablePart {
  int64_t first = 0, all = 0;
};

inline TablePart whole_table(const View& table) { return {0, table.shape[0]}; }

}  // namespace sheaf::kernels
