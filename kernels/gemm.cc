#include "sheaf/kernels/gemm.h"

#include <utility>

#include "sheaf/core/error.h"

namespace sheaf::kernels {

Gemm linear_product(const View& x, const View& weight, const View& bias, const View& y, bool fp8) {
  check<ShapeError>(weight.rank() == 2 && x.rank() == y.rank() && x.rank() >= 1, "[linear] input ",
                    x.shape, ", weight ", weight.shape, ", output ", y.shape);
  return {.who = "linear", .a = at_least_matrix(x), .b = transposed(weight),
          .c = at_least_matrix(y), .bias = bias, .fp8 = fp8};
}

Gemm gelu_linear_gradient_product(const View& dy, const View& weight, const View& dx, bool fp8) {
  return {.who = "gelu_linear_backward", .a = at_least_matrix(dy), .b = weight,
          .c = at_least_matrix(dx), .bias = {}, .fp8 = fp8};
}

namespace {

/// Each distinct matrix of a batch, once.
View distinct(View v) {
  for (int d = 0; d + 2 < v.rank(); ++d)
    if (v.strides[d] == 0) v.shape[d] = 1;
  return v;
}
size_t in_lines(const View& v) { return (static_cast<size_t>(v.bytes()) + 127) / 128 * 128; }

}  // namespace

View dense_as_it_lies(void* data, const View& v) {
  const bool columns = v.rank() > 1 && v.strides.dim(-2) == 1 && v.strides.back() != 1;
  if (!columns) return View::dense(data, v.dtype, v.shape);
  return transposed(View::dense(data, v.dtype, transposed(v).shape));
}

RoundedOperands::RoundedOperands(const Gemm& g, bool keep_columns)
    : from_a(distinct(g.a)), from_b(distinct(transposed(g.b))) {
  const auto place_for = [&](const View& v) {
    return keep_columns ? dense_as_it_lies(nullptr, v) : View::dense(nullptr, v.dtype, v.shape);
  };
  a = place_for(from_a), b = place_for(from_b);
  a_bytes = in_lines(a), b_bytes = in_lines(b);
}

void RoundedOperands::place(void* memory) {
  a.data = memory, b.data = static_cast<char*>(memory) + a_bytes;
}

Gemm RoundedOperands::product(const Gemm& g) const {
  Gemm out = g;
  out.a = a, out.b = transposed(b), out.fp8 = false;
  return out;
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
