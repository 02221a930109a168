// The orthogonal factor of matrices, by matrix products only.
#pragma once

#include "sheaf/core/tensor.h"

namespace sheaf::optim {

struct OrthogonalizeOptions {
  int64_t steps = 5;  ///< of Newton-Schulz
  double eps = 1e-7;  ///< added to the Frobenius norm that a matrix is divided by
};

/// Roughly U Vᵀ for matrices x[.., M, N] with singular value decompositions U S Vᵀ: Newton-Schulz iterations of the quintic
/// polynomial 3.4445 s - 4.7750 s³ + 2.0315 s⁵, which brings every singular value that is not tiny into about [0.7, 1.2] (Jordan et
/// al. 2024, https://kellerjordan.github.io/posts/muon/). The products are over the longer side. In x's dtype; bf16 is enough.
/// Matrices are independent of each other: shards of leading dimensions are kept, without communication; in a dense x[k, M, N] the
/// bits of each depend neither on k nor on the others.
Tensor orthogonalize(const Tensor& x, const OrthogonalizeOptions& options = {});

}  // namespace sheaf::optim
