// A picture of a planned step: when which memory is held for what, and when each unit's weights are gathered and its gradients whole.
#pragma once

#include <string>

#include "sheaf/models/plan.h"

namespace sheaf::models {

/// An SVG, self-contained, with the tape's nodes from left to right. Above, the bytes alive while each node runs, by what they are held
/// for (HeldFor): the highest point is plan.peak. Below, a row per unit: how long its weights are gathered, how long its gradient
/// exists before it is reduced, and its communication. Names and sizes appear under the mouse. Where there are more nodes than
/// pixels, a pixel shows the node with the most bytes. Of a plan with train.compile there is no history: a program's values lie in one
/// arena.
std::string to_svg(const Plan& plan, const std::string& title);

}  // namespace sheaf::models
