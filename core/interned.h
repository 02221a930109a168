// Lists that small values point to: equal ones have one address, for the life of the process. Ownership maps and the
// attributes of nodes hold that address, so they stay a few bytes, and comparing them compares addresses.
#pragma once

#include <cstdint>
#include <vector>

namespace sheaf {

/// Thread-safe. Of real numbers those with the same bits are equal.
const std::vector<int64_t>* interned(const std::vector<int64_t>& list);
const std::vector<double>* interned(const std::vector<double>& list);

}  // namespace sheaf
