#include "sheaf/kernels/linear.h"

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/gemm.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::cpu {
namespace {

Gemm forward(const View& x, const View& weight, const View& bias, const View& y, bool fp8) {
  const Gemm product = linear_product(x, weight, bias, y, fp8);
  if (bias.rank() != 0)
    check<ShapeError>(bias.rank() == 1 && bias.shape[0] == weight.shape[0] &&
                          (bias.strides[0] == 1 || bias.shape[0] <= 1),
                      "[linear] bias ", bias.shape, " for weight ", weight.shape,
                      " must be a dense vector of its rows");
  return product;
}

/// dW = dyᵀ x over all rows. Rows that are not evenly spaced are first copied to the workspace.
struct WeightGradient {
  View dy, x, dweight;
  bool copy_dy, copy_x, fp8;

  WeightGradient(const View& dy_in, const View& x_in, const View& dweight_in, bool rounds)
      : dy(as_matrix(at_least_matrix(dy_in))),
        x(as_matrix(at_least_matrix(x_in))),
        dweight(dweight_in),
        fp8(rounds) {
    copy_dy = dy.rank() == 0, copy_x = x.rank() == 0;
    if (copy_dy)
      dy = View::dense(nullptr, dy_in.dtype,
                       {dy_in.numel() / dy_in.shape.back(), dy_in.shape.back()});
    if (copy_x)
      x = View::dense(nullptr, x_in.dtype, {x_in.numel() / x_in.shape.back(), x_in.shape.back()});
  }
  size_t copies() const {
    return (copy_dy ? line_align(static_cast<size_t>(dy.bytes())) : 0) +
           (copy_x ? line_align(static_cast<size_t>(x.bytes())) : 0);
  }
  Gemm gemm() const {
    return {.who = "linear_weight_gradient", .a = transposed(dy), .b = x, .c = dweight, .bias = {}, .fp8 = fp8};
  }
};

/// sums[width] += the rows of `from`, one after another.
template <class C, class... S>
SHEAF_INLINE void add_rows(int64_t width, C* sums, const S*... from) {
  for_lanes(width, [&](int64_t i, auto n) {
    Lanes<C> sum = load_lanes(sums + i, n);
    ((sum = sum + load_lanes(from + i, n)), ...);
    store_lanes(sums + i, sum, n);
  });
}

constexpr int64_t kStrip = 1024;

/// out[width] = the sums of `width` columns from `column` on, width <= kStrip. Memory is read along its rows, a few
/// at a time, so that updating the sums in the cache is not most of the work.
template <class T, class Out>
void sum_columns(const Rows<T>& rows, int64_t column, int64_t width, Out* out) {
  using C = ComputeType<T>;
  constexpr int64_t kBlockRows = 64;
  C total[kStrip], block[kStrip];
  const auto at = [&](int64_t row) { return rows[row] + column; };
  std::fill_n(total, width, C(0));
  for (int64_t r = 0; r < rows.count();) {
    const int64_t end = std::min(r + kBlockRows, rows.count());
    std::fill_n(block, width, C(0));
    for (; r + 4 <= end; r += 4) add_rows(width, block, at(r), at(r + 1), at(r + 2), at(r + 3));
    for (; r < end; ++r) add_rows(width, block, at(r));
    add_rows(width, total, block);
  }
  for_lanes(width, [&](int64_t i, auto n) { store_lanes(out + i, load_lanes(total + i, n), n); });
}

}  // namespace

size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y,
                        bool fp8) {
  return gemm_workspace(forward(x, weight, bias, y, fp8));
}
void linear(const View& x, const View& weight, const View& bias, const View& y,
            Workspace workspace, bool fp8) {
  gemm(forward(x, weight, bias, y, fp8), workspace);
}

size_t linear_gelu_workspace(const View& x, const View& weight, const View& bias,
                             const View& before, const View&, bool fp8) {
  return linear_workspace(x, weight, bias, before, fp8);
}
void linear_gelu(const View& x, const View& weight, const View& bias, const View& before,
                 const View& value, Workspace workspace, bool fp8) {
  linear(x, weight, bias, before, workspace, fp8);
  unary(UnaryOp::gelu_tanh, before, value);
}

size_t gelu_linear_backward_workspace(const View& dy, const View& weight, const View&,
                                      const View& dbefore, bool fp8) {
  return gemm_workspace(gelu_linear_gradient_product(dy, weight, dbefore, fp8));
}
void gelu_linear_backward(const View& dy, const View& weight, const View& before,
                          const View& dbefore, Workspace workspace, bool fp8) {
  gemm(gelu_linear_gradient_product(dy, weight, dbefore, fp8), workspace);
  activation_backward(BackwardOp::gelu_tanh, before, dbefore, dbefore);
}

size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight,
                                        bool fp8) {
  const WeightGradient w(dy, x, dweight, fp8);
  return w.copies() + gemm_workspace(w.gemm());
}
void linear_weight_gradient(const View& dy, const View& x, const View& dweight,
                            Workspace workspace, bool fp8) {
  WeightGradient w(dy, x, dweight, fp8);
  char* next = static_cast<char*>(workspace.data);
  check<ShapeError>(workspace.bytes >= w.copies(), "[linear_weight_gradient] workspace too small: ", workspace.bytes, " bytes, of ", w.copies());
  const auto copied = [&](const View& from) {
    const View to = View::dense(next, from.dtype, from.shape);
    copy(from, to);
    next += line_align(static_cast<size_t>(to.bytes()));
    return to.data;
  };
  if (w.copy_dy) w.dy.data = copied(dy);
  if (w.copy_x) w.x.data = copied(x);
  const size_t used = w.copies();
  gemm(w.gemm(), {static_cast<char*>(workspace.data) + used, workspace.bytes - used});
}

void linear_bias_gradient(const View& dy, const View& dbias) {
  check<ShapeError>(dbias.rank() == 1 && dy.rank() >= 1 && dbias.shape[0] == dy.shape.back(),
                    "[linear_bias_gradient] ", dy.shape, " into ", dbias.shape);
  visit_floating("linear_bias_gradient", dy.dtype, [&]<class T>() {
    const Rows<T> rows("linear_bias_gradient", dy);
    const int64_t count = rows.count(), steps = (rows.cols() + kLanes - 1) / kLanes;
    auto columns = [&]<class Out>(Out* out, int64_t begin, int64_t end) {
      const int64_t last = std::min(end * kLanes, rows.cols());
      for (int64_t i = begin * kLanes; i < last; i += kStrip)
        sum_columns(rows, i, std::min(kStrip, last - i), out + i);
    };
    parallel_for(steps, std::max<int64_t>(4, row_grain(count * kLanes)),
                 [&](int64_t begin, int64_t end) {
                   if (dbias.dtype == dy.dtype) return columns(dbias.as<T>(), begin, end);
                   if constexpr (!std::is_same_v<T, double>)
                     if (dbias.dtype == kF32) return columns(dbias.as<float>(), begin, end);
                   fail<DTypeError>("[linear_bias_gradient] ", dy.dtype, " into ", dbias.dtype);
                 });
  });
}

size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight, const View&,
                                  bool fp8) {
  return linear_weight_gradient_workspace(dy, x, dweight, fp8);
}
void linear_gradients(const View& dy, const View& x, const View& dweight, const View& dbias,
                      Workspace workspace, bool fp8) {
  linear_weight_gradient(dy, x, dweight, workspace, fp8);
  linear_bias_gradient(dy, dbias);
}

}  // namespace sheaf::kernels::cpu
