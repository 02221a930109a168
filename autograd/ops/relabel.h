// relabel: what a rank holds, under another type. How rowwise and local_map enter and leave.
#pragma once

#include "sheaf/autograd/op.h"

namespace sheaf {

/// The same local elements as `type`, which the caller answers for: a node `enter_local` or `leave_local` that moves no byte,
/// each the adjoint of the other.
Tensor relabel(const Tensor& x, const Type& type, bool enters);

}  // namespace sheaf
