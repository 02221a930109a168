// Triangles of matrices, and the identity: masks made of positions.
#include "sheaf/autograd/ops/common.h"

namespace sheaf {
namespace {

/// column - row of each place of x[.., M, N]'s matrices: i64 [M, N].
Tensor diagonals(const char* op, const Tensor& x) {
  expect_defined(op, x);
  if (x.rank() < 2) fail<ShapeError>("[", op, "] ", x.type(), " is no matrix");
  DeviceScope on_device_of_x(x.device());
  return sub(arange(x.size(-1)), unsqueeze(arange(x.size(-2)), 1));
}

}  // namespace

Tensor tril(const Tensor& x, int64_t diagonal) { return where(le(diagonals("tril", x), static_cast<double>(diagonal)), x, 0.0); }
Tensor triu(const Tensor& x, int64_t diagonal) { return where(ge(diagonals("triu", x), static_cast<double>(diagonal)), x, 0.0); }
Tensor eye(int64_t n, DType dtype) { return cast(eq(arange(n), unsqueeze(arange(n), 1)), dtype); }

}  // namespace sheaf
