// The linear layer y = x Wᵀ + b and the gradients of W and b (x's is a matmul). Leading
// dimensions of x and y are rows.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// y[.., O] = x[.., I] · weight[O, I]ᵀ + bias[O]; without a bias, pass View{} (null shape). All have one floating
/// dtype.
size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y,
                        bool fp8 = false);
void linear(const View& x, const View& weight, const View& bias, const View& y,
            Workspace workspace, bool fp8 = false);

/// before = linear(x, weight, bias), value = gelu(before) in its tanh form; both have y's shape and dtype.
size_t linear_gelu_workspace(const View& x, const View& weight, const View& bias,
                             const View& before, const View& value, bool fp8 = false);
void linear_gelu(const View& x, const View& weight, const View& bias, const View& before,
                 const View& value, Workspace workspace, bool fp8 = false);

/// The gradient of gelu's input, through linear(gelu(before[.., I]), weight[O, I]):
/// dbefore = gelu'(before) * (dy[.., O] · weight).
size_t gelu_linear_backward_workspace(const View& dy, const View& weight, const View& before,
                                      const View& dbefore, bool fp8 = false);
void gelu_linear_backward(const View& dy, const View& weight, const View& before,
                          const View& dbefore, Workspace workspace, bool fp8 = false);

/// dweight[O, I] = dyᵀ · x, stored; dweight may be f32 if dy and x are bf16.
size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight,
                                        bool fp8 = false);
void linear_weight_gradient(const View& dy, const View& x, const View& dweight,
                            Workspace workspace, bool fp8 = false);

/// dbias[O] = the sum of dy's rows, stored. Blocks of 64 rows are summed in row order, then the
/// blocks in order.
void linear_bias_gradient(const View& dy, const View& dbias);

/// Both gradients.
size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight,
                                  const View& dbias, bool fp8 = false);
void linear_gradients(const View& dy, const View& x, const View& dweight, const View& dbias,
                      Workspace workspace, bool fp8 = false);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Products are cuBLASLt's: see cuda::matmul.
namespace cuda {

size_t linear_workspace(const View& x, const View& weight, const View& bias, const View& y,
                        bool fp8 = false);
void linear(const Stream& stream, const View& x, const View& weight, const View& bias,
            const View& y, Workspace workspace, bool fp8 = false);

/// One product for both results in bf16 and f16, if cuBLASLt has it: gelu then reads the f32 sums, before they are rounded into
/// `before`. Else a product and our own kernel.
size_t linear_gelu_workspace(const View& x, const View& weight, const View& bias,
                             const View& before, const View& value, bool fp8 = false);
void linear_gelu(const Stream& stream, const View& x, const View& weight, const View& bias,
                 const View& before, const View& value, Workspace workspace, bool fp8 = false);
size_t gelu_linear_backward_workspace(const View& dy, const View& weight, const View& before,
                                      const View& dbefore, bool fp8 = false);
void gelu_linear_backward(const Stream& stream, const View& dy, const View& weight,
                          const View& before, const View& dbefore, Workspace workspace,
                          bool fp8 = false);

size_t linear_weight_gradient_workspace(const View& dy, const View& x, const View& dweight,
                                        bool fp8 = false);
void linear_weight_gradient(const Stream& stream, const View& dy, const View& x,
                            const View& dweight, Workspace workspace, bool fp8 = false);

/// The CPU's bits: the same sums in the same order.
size_t linear_bias_gradient_workspace(const View& dy, const View& dbias);
void linear_bias_gradient(const Stream& stream, const View& dy, const View& dbias,
                          Workspace workspace);

/// One product that also sums dy's rows, if cuBLASLt has it and the gradients have one dtype; the order of the bias's sum, and so its
/// bits, are then cuBLASLt's, the same at every run. Else the two above.
size_t linear_gradients_workspace(const View& dy, const View& x, const View& dweight,
                                  const View& dbias, bool fp8 = false);
void linear_gradients(const Stream& stream, const View& dy, const View& x, const View& dweight,
                      const View& dbias, Workspace workspace, bool fp8 = false);

}  // namespace cuda
}  // namespace sheaf::kernels
