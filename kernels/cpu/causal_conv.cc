#include "sheaf/kernels/causal_conv.h"

#include "sheaf/kernels/causal_conv_operands.h"
#include "sheaf/kernels/cpu/causal_conv_squares.h"
#include "sheaf/kernels/cpu/check_documents.h"
#include "sheaf/kernels/cpu/simd.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(causal_conv)
SHEAF_SIMD_DECLARE(causal_conv_backward)

namespace cpu {

void causal_conv(const CausalConvOperands& x, const View& y) {
  check_causal_conv("causal_conv", x, y);
  if (y.numel() == 0) return;
  check_documents("causal_conv", x.begins);
  (has_v4() ? v4::causal_conv : v3::causal_conv)(x, y);
}

size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View& dy, const View&, const View& dweight) {
  const ConvSquares s(x);
  const int64_t taps = x.weight.shape[1];
  const size_t size = dy.dtype == kF64 ? 8 : 4;
  return line_align(static_cast<size_t>(s.slots() * s.slope_cells(taps)) * size) +
         (given(dweight) ? line_align(static_cast<size_t>(s.part_cells(taps)) * size) : 0);
}

void causal_conv_backward(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight, Workspace workspace) {
  const char* who = "causal_conv_backward";
  check_causal_conv_backward(who, x, dy, dx, dweight);
  check<ShapeError>(workspace.bytes >= causal_conv_backward_workspace(x, dy, dx, dweight), "[", who, "] workspace too small: ",
                    workspace.bytes);
  check_documents(who, x.begins);
  (has_v4() ? v4::causal_conv_backward : v3::causal_conv_backward)(x, dy, dx, dweight, workspace);
}

}  // namespace cpu
}  // namespace sheaf::kernels
