// Dropout.
#pragma once

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// In training mode each element is zeroed with probability p and the others are divided by 1 - p (Srivastava et al. 2014); otherwise
/// the identity. Which ones depends on the recording's seed, step and samples and on this module's path, not on how the batch is
/// sharded.
struct Dropout : Module {
  double p;

  explicit Dropout(double p) : p(p) {
    check<ConfigError>(p >= 0.0 && p < 1.0, "[dropout] probability ", p, " is not in [0, 1)");
  }
  Tensor forward(const Tensor& x) { return training() && p > 0.0 ? dropout(x, p) : x; }
  SHEAF_FIELDS();
};

}  // namespace sheaf::nn
