// A recorded training step as a program: what train.compile runs again and again.
#pragma once

#include <span>

#include "sheaf/autograd/program.h"
#include "sheaf/distributed/world.h"
#include "sheaf/models/training_step.h"

namespace sheaf::models {

/// Collective. The step's program, with loss and norm wanted. If `memory_budget` is not 0, units stay gathered instead of
/// being gathered again (autograd/passes/keep_gathered.h), as many as there is room for on every rank within so many bytes of
/// `device`, what is in use now included.
Program step_program(const RecordedStep& step, int64_t memory_budget, World& world, Device device);

}  // namespace sheaf::models
