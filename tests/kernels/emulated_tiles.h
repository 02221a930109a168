// Linked into a test, this lets it run code for matrix tiles (AMX) on machines without them.
#pragma once

#include <cstdint>

namespace sheaf::testing {

/// How many tile instructions were emulated in this process; 0 where the machine executes them itself.
int64_t emulated_tile_instructions();

}  // namespace sheaf::testing
