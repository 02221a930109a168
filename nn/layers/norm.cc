#include "sheaf/nn/layers/norm.h"

#include "sheaf/autograd/recording.h"

namespace sheaf::nn {

std::vector<Tensor> rms_norms_of_shared_rows(const std::vector<Tensor>& xs, const std::vector<const RMSNorm*>& norms) {
  std::vector<Tensor> out;
  const int axis = norms[0]->weight.cut_axis();
  if (axis < 0 || !xs[0].layout().mesh()) {
    for (size_t i = 0; i < xs.size(); ++i) out.push_back(rms_norm(xs[i], norms[i]->weight, norms[i]->eps));
    return out;
  }
  const DType statistics = xs[0].dtype() == kF64 ? kF64 : kF32;
  Tensor squares;  // [.., xs]
  {
    const RecomputeScope again;
    std::vector<Tensor> of_each;
    for (const Tensor& x : xs) of_each.push_back(sum(square(cast(x, statistics)), {-1}, /*keepdim=*/true));
    squares = concat(of_each, -1);
  }
  squares = redistribute(squares, squares.layout().with(axis, Placement::replicate()));
  const RecomputeScope again;
  const std::vector<Tensor> of_each = chunk(squares, std::ssize(xs), -1);
  for (size_t i = 0; i < xs.size(); ++i) {
    const Tensor rstd = rsqrt(of_each[i] * (1.0 / static_cast<double>(xs[i].size(-1))) + norms[i]->eps);
    out.push_back(cast(cast(xs[i], statistics) * rstd * cast(norms[i]->weight, statistics), xs[i].dtype()));
  }
  return out;
}

}  // namespace sheaf::nn
