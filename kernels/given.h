// Operands that need not be there: View{} stands for one that is not.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

inline bool given(const View& v) { return v.rank() != 0; }

}  // namespace sheaf::kernels
