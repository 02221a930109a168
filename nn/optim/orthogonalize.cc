#include "sheaf/nn/optim/orthogonalize.h"

#include "sheaf/autograd/ops.h"

namespace sheaf::optim {

Tensor orthogonalize(const Tensor& matrices, const OrthogonalizeOptions& options) {
  const auto turned = [](const Tensor& x) { return transpose(x, -1, -2); };
  check<ShapeError>(matrices.rank() >= 2, "[orthogonalize] ", matrices.type(), " is no matrix");
  const auto product = [](const Tensor& x, const Tensor& y) { return matmul(x, y, {.each_alone = true}); };
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
  const bool tall = matrices.size(-2) > matrices.size(-1);
  Tensor x = tall ? turned(matrices) : matrices;
  x = x / (sqrt(sum(square(x), {-2, -1}, true)) + options.eps);
  for (int64_t i = 0; i < options.steps; ++i) {
    const Tensor gram = product(x, turned(x));
    x = a * x + product(b * gram + c * product(gram, gram), x);
  }
  return tall ? turned(x) : x;
}

}  // namespace sheaf::optim
