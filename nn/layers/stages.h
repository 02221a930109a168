// Out of a pipeline: what its last stage has computed is made available to other stages.
#pragma once

#include "sheaf/autograd/ops.h"

namespace sheaf::nn {

/// x, placed as `p` along every axis on which it is on one rank: Partial, an addend of 0 elsewhere, moves no byte; whole is
/// sent to all.
inline Tensor off_stages(const Tensor& x, const Placement& p) {
  Layout to = x.layout();
  for (int a = 0; a < to.num_axes(); ++a)
    if (to[a].is_single()) to[a] = p;
  return redistribute(x, to);
}

/// A loss of one stage as that of all: the sum over the stages. Losses that other stages have can be added to it.
inline Tensor sum_over_stages(const Tensor& x) { return off_stages(x, Placement::partial()); }
/// Logits of one stage on all of them.
inline Tensor to_all_stages(const Tensor& x) { return off_stages(x, Placement::replicate()); }

}  // namespace sheaf::nn
