#include "sheaf/kernels/gemm.h"

#include <utility>

#include "sheaf/core/error.h"

namespace sheaf::kernels {

Gemm linear_product(const View& x, const View& weight, const View& bias, const View& y) {
  check<ShapeError>(weight.rank() == 2 && x.rank() == y.rank() && x.rank() >= 1, "[linear] input ",
                    x.shape, ", weight ", weight.shape, ", output ", y.shape);
  return {"linear", at_least_matrix(x), transposed(weight), at_least_matrix(y), bias};
}

Gemm gelu_linear_gradient_product(const View& dy, const View& weight, const View& dx) {
  return {"gelu_linear_backward", at_least_matrix(dy), weight, at_least_matrix(dx), {}};
}

View transposed(View v) {
  const int n = v.rank();
  std::swap(v.shape[n - 1], v.shape[n - 2]);
  std::swap(v.strides[n - 1], v.strides[n - 2]);
  return v;
}

View as_matrix(const View& v) {
  int64_t rows = 1, stride = 0;
  for (int i = v.rank() - 2; i >= 0; --i) {
    if (v.shape[i] == 1) continue;
    if (rows == 1) {
      stride = v.strides[i];
    } else if (v.strides[i] != rows * stride && v.numel() != 0) {
      return {};
    }
    rows *= v.shape[i];
  }
  if (rows == 1) stride = v.shape.back();
  return {v.data, v.dtype, Shape{rows, v.shape.back()}, Shape{stride, v.strides.back()}};
}

View at_least_matrix(View v) {
  if (v.rank() == 1) v.shape.insert(0, 1), v.strides.insert(0, v.shape.back());
  return v;
}

}  // namespace sheaf::kernels
