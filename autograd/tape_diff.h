// Where two tapes first differ.
#pragma once

#include <optional>

#include "sheaf/autograd/checks.h"

namespace sheaf {

/// The first node at which `a` and `b` differ: by op, attributes, module path, phase, inputs, types of outputs or their memory; or
/// the first one that only one of them has. Empty if they are equal. The memory of leaves is not compared.
std::optional<Finding> first_difference(const Tape& a, const Tape& b);

}  // namespace sheaf
