// Leaving a pipeline: results of its last stage are made available to other stages.
#pragma once

#include "sheaf/autograd/ops.h"

namespace sheaf::nn {

/// x, placed as `p` along every axis on which it is on one rank: Partial, with addends of 0 on the others, moves no data; a whole
/// placement is sent to all.
inline Tensor off_stages(const Tensor& x, const Placement& p) {
  Layout to = x.layout();
  for (int a = 0; a < to.num_axes(); ++a)
    if (to[a].is_single()) to[a] = p;
  return redistribute(x, to);
}

/// A loss of one stage as one of all stages: the sum over the stages. Losses of other stages can be added to it.
inline Tensor sum_over_stages(const Tensor& x) { return off_stages(x, Placement::partial()); }
/// Logits of one stage, on all stages.
inline Tensor to_all_stages(const Tensor& x) { return off_stages(x, Placement::replicate()); }

}  // namespace sheaf::nn
