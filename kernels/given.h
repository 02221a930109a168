// Optional operands: View{} stands for an absent one.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

inline bool given(const View& v) { return v.rank() != 0; }

}  // namespace sheaf::kernels
