// Keeps as much of a step's program gathered as every rank has memory for.
#pragma once

#include <functional>

#include "sheaf/autograd/program.h"
#include "sheaf/distributed/world.h"

namespace sheaf {

/// For CompileOptions::rewrite. Collective over `world`. Units stay gathered instead of being gathered again
/// (autograd/passes/keep_gathered.h), as many as each rank has room for within `bytes` bytes of its `device`, including what
/// is in use when the program is made. A program that needs more than that anyway keeps only units that make it no larger.
std::function<Program(const Program& plain)> keep_within(int64_t bytes, World& world, Device device);

}  // namespace sheaf
