// Triangles of matrices, and the identity: masks made of positions.
#include <algorithm>

#include "sheaf/autograd/ops/common.h"

namespace sheaf {
namespace {

/// Where `compare` holds between the column of a place of x[.., M, N]'s matrices and its row + diagonal: bool [M, N], and nothing
/// larger.
template <class Compare>
Tensor places(const char* op, const Tensor& x, int64_t diagonal, Compare&& compare) {
  expect_defined(op, x);
  if (x.rank() < 2) fail<ShapeError>("[", op, "] ", x.type(), " is no matrix");
  const int64_t beyond = x.size(-2) + x.size(-1);  // a diagonal outside of the matrices
  diagonal = std::clamp(diagonal, -beyond, beyond);
  DeviceScope on_device_of_x(x.device());
  return compare(arange(x.size(-1)), unsqueeze(add(arange(x.size(-2)), static_cast<double>(diagonal)), 1));
}

}  // namespace

Tensor tril(const Tensor& x, int64_t diagonal) {
  return where(places("tril", x, diagonal, [](const Tensor& column, const Tensor& row) { return le(column, row); }), x, 0.0);
}
Tensor triu(const Tensor& x, int64_t diagonal) {
  return where(places("triu", x, diagonal, [](const Tensor& column, const Tensor& row) { return ge(column, row); }), x, 0.0);
}
Tensor eye(int64_t n, DType dtype) { return cast(eq(arange(n), unsqueeze(arange(n), 1)), dtype); }

}  // namespace sheaf
