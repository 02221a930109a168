// relabel: a rank's local elements under another type. How rowwise and local_map enter and leave.
#pragma once

#include "sheaf/autograd/op.h"

namespace sheaf {

/// The same local elements typed as `type`, for whose correctness the caller is responsible: a node `enter_local` or `leave_local`
/// that moves no data, each the adjoint of the other.
Tensor relabel(const Tensor& x, const Type& type, bool enters);

}  // namespace sheaf
