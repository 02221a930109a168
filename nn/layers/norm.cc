#include "sheaf/nn/layers/norm.h"

#include "sheaf/autograd/recording.h"

namespace sheaf::nn {

Tensor rms_norm_of_shared_rows(const Tensor& x, const RMSNorm& norm) {
  const int axis = norm.weight.cut_axis();
  if (axis < 0 || !x.layout().mesh()) return rms_norm(x, norm.weight, norm.eps);
  const DType statistics = x.dtype() == kF64 ? kF64 : kF32;
  Tensor squares;
  {
    const RecomputeScope again;
    squares = sum(square(cast(x, statistics)), {-1}, /*keepdim=*/true);
  }
  squares = redistribute(squares, squares.layout().with(axis, Placement::replicate()));
  const RecomputeScope again;
  const Tensor rstd = rsqrt(squares * (1.0 / static_cast<double>(x.size(-1))) + norm.eps);
  return cast(cast(x, statistics) * rstd * cast(norm.weight, statistics), x.dtype());
}

}  // namespace sheaf::nn
