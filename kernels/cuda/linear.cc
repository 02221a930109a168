#include "sheaf/kernels/linear.h"

#include <algorithm>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/code_loading.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::cuda {
namespace {

/// After a product that included the work of `kernels`: while products are timed, loads the code of these kernels. This rank has
/// timed only its own products, and another rank's choice, which it will adopt, may leave that work to them.
template <class F>
void load_kernels(F&& kernels) {
  if (!TuneProducts::active()) return;
  const CodeLoading loading;
  kernels();
}

/// dW = dyᵀ x over all rows. Rows that are not evenly spaced are first copied to the workspace.
struct WeightGradient {
  View dy_in, x_in, dy, x, dweight;
  bool copy_dy, copy_x, fp8;

  WeightGradient(const View& dy_given, const View& x_given, const View& dweight_given,
                 bool rounds)
      : dy_in(at_least_matrix(dy_given)),
        x_in(at_least_matrix(x_given)),
        dy(as_matrix(dy_in)),
        x(as_matrix(x_in)),
        dweight(dweight_given),
        fp8(rounds) {
    copy_dy = dy.rank() == 0, copy_x = x.rank() == 0;
    if (copy_dy) dy = dense_matrix(nullptr, dy_in);
    if (copy_x) x = dense_matrix(nullptr, x_in);
  }
  Gemm gemm() const {
    return {.who = kName, .a = transposed(dy), .b = x, .c = dweight, .bias = {}, .fp8 = fp8};
  }
  size_t workspace() const {
    return (copy_dy ? line_align(static_cast<size_t>(dy.bytes())) : 0) +
           (copy_x ? line_align(static_cast<size_t>(x.bytes())) : 0) + gemm_workspace(gemm());
  }
  /// Enqueues the copies; returns the part of the workspace for gemm().
  Workspace prepare(const Stream& stream, Workspace workspace) {
    Carver carver(kName, workspace);
    const size_t bytes = gemm_workspace(gemm());
    const Workspace out{carver.take<char>(static_cast<int64_t>(bytes)), bytes};
    const auto copy_rows = [&](const View& from, View& to) {
      to.data = carver.take<char>(to.bytes());
      View rows = to;
      rows.shape = from.shape, rows.strides = from.shape.contiguous_strides();
      copy(stream, from, rows);
    };
    if (copy_dy) copy_rows(dy_in, dy);
    if (copy_x) copy_rows(x_in, x);
    return out;
  }

  static constexpr const char* kName = "linear_weight_gradient";
};

}  // namespace

size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y,
                        bool fp8) {
  return gemm_workspace(linear_product(x, weight, bias, y, fp8));
}
void linear(const Stream& stream, const View& x, const View& weight, const View& bias,
            const View& y, Workspace workspace, bool fp8) {
  gemm(stream, linear_product(x, weight, bias, y, fp8), workspace);
}

size_t linear_gelu_workspace(const View& x, const View& weight, const View& bias,
                             const View& before, const View&, bool fp8) {
  return linear_workspace(x, weight, bias, before, fp8);
}
void linear_gelu(const Stream& stream, const View& x, const View& weight, const View& bias,
                 const View& before, const View& value, Workspace workspace, bool fp8) {
  const Gemm product = linear_product(x, weight, bias, value, fp8);
  const auto gelu = [&] { unary(stream, UnaryOp::gelu_tanh, before, value); };
  if (gemm_with(stream, product, Fused::gelu, before, workspace)) return load_kernels(gelu);
  linear(stream, x, weight, bias, before, workspace, fp8);
  gelu();
}

size_t gelu_linear_backward_workspace(const View& dy, const View& weight, const View&,
                                      const View& dbefore, bool fp8) {
  return gemm_workspace(gelu_linear_gradient_product(dy, weight, dbefore, fp8));
}
void gelu_linear_backward(const Stream& stream, const View& dy, const View& weight,
                          const View& before, const View& dbefore, Workspace workspace, bool fp8) {
  const Gemm product = gelu_linear_gradient_product(dy, weight, dbefore, fp8);
  const auto gelu = [&] { activation_backward(stream, BackwardOp::gelu_tanh, before, dbefore, dbefore); };
  if (gemm_with(stream, product, Fused::gelu_gradient, before, workspace))
    return load_kernels(gelu);
  gemm(stream, product, workspace);
  gelu();
}

size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight,
                                        bool fp8) {
  return WeightGradient(dy, x, dweight, fp8).workspace();
}
void linear_weight_gradient(const Stream& stream, const View& dy, const View& x,
                            const View& dweight, Workspace workspace, bool fp8) {
  WeightGradient w(dy, x, dweight, fp8);
  const Workspace scratch = w.prepare(stream, workspace);
  gemm(stream, w.gemm(), scratch);
}

size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight,
                                  const View& dbias, bool fp8) {
  return std::max(linear_weight_gradient_workspace(dy, x, dweight, fp8),
                  linear_bias_gradient_workspace(dy, dbias));
}
void linear_gradients(const Stream& stream, const View& dy, const View& x, const View& dweight,
                      const View& dbias, Workspace workspace, bool fp8) {
  WeightGradient w(dy, x, dweight, fp8);
  const Workspace scratch = w.prepare(stream, workspace);
  const auto sums = [&] { linear_bias_gradient(stream, dy, dbias, workspace); };
  if (gemm_with(stream, w.gemm(), Fused::row_sums, dbias, scratch)) return load_kernels(sums);
  gemm(stream, w.gemm(), scratch);
  sums();  // the product is done with the workspace by then
}

}  // namespace sheaf::kernels::cuda
