// Where two tapes part.
#pragma once

#include <optional>

#include "sheaf/autograd/checks.h"

namespace sheaf {

/// The first node at which `a` and `b` differ: by op, attributes, module path, phase, inputs, types of outputs or where these
/// lie; or the first that one of them has more. Empty if none does. Which memory their leaves have is not compared.
std::optional<Finding> first_difference(const Tape& a, const Tape& b);

}  // namespace sheaf
