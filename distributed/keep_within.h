// Keeps as many units of a step's program gathered as fit into every rank's memory.
#pragma once

#include <functional>

#include "sheaf/autograd/program.h"
#include "sheaf/distributed/world.h"

namespace sheaf {

/// For CompileOptions::rewrite. Collective over `world`. Keeps units gathered instead of gathering them again
/// (autograd/passes/keep_gathered.h), as many as fit on each rank within `bytes` bytes of its `device`, including memory in use when
/// the program is created. A program that needs more than that anyway keeps only units that make it no larger.
std::function<Program(const Program& plain)> keep_within(int64_t bytes, World& world, Device device);

}  // namespace sheaf
