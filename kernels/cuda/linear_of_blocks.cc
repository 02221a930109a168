#include "sheaf/kernels/linear_of_blocks.h"

#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_of_blocks_operands.h"
#include "sheaf/kernels/quantize.h"

namespace sheaf::kernels::cuda {

size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y) {
  const View weight = weight_of_blocks(x, blocks, format, bias, y, nullptr);
  return weight_bytes(weight) + linear_workspace(x, weight, bias, y);
}

void linear_of_blocks(const Stream& stream, const View& x, const View& blocks, BlockFormat format,
                      const View& bias, const View& y, Workspace workspace) {
  const View weight = weight_of_blocks(x, blocks, format, bias, y, workspace.data);
  const Workspace rest = behind(workspace, weight_bytes(weight));
  dequantize(stream, blocks, format, weight);
  linear(stream, x, weight, bias, y, rest);
}

}  // namespace sheaf::kernels::cuda
