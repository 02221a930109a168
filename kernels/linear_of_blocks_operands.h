// How the kernels of linear_of_blocks() dequantize a weight into their workspace.
#pragma once

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The weight [O, I] of x's dtype that `blocks` encode, dense at `data`; refuses operands that do not fit.
inline View weight_of_blocks(const View& x, const View& blocks, BlockFormat format,
                             const View& bias, const View& y, void* data) {
  check<DTypeError>(blocks.dtype == kU8, "[linear_of_blocks] blocks are u8, not ", blocks.dtype);
  check<ShapeError>(blocks.rank() == 2 && blocks.contiguous(), "[linear_of_blocks] blocks ",
                    blocks.shape, " must be a dense matrix");
  const View weight = View::dense(data, x.dtype, values_shape(blocks.shape, format));
  const int64_t outputs = weight.shape[0], inputs = weight.shape[1];
  const bool rows = x.rank() > 0 && y.rank() > 0 && x.shape.back() == inputs &&
                    y.shape.back() == outputs && x.numel() * outputs == y.numel() * inputs;
  check<ShapeError>(rows && (bias.rank() == 0 || bias.shape == Shape{outputs}),
                    "[linear_of_blocks] ", x.shape, " and ", weight.shape, " and a bias ",
                    bias.shape, " into ", y.shape);
  return weight;
}

/// Its bytes, rounded up for alignment of what follows.
inline size_t weight_bytes(const View& weight) {
  return (static_cast<size_t>(weight.bytes()) + 255) / 256 * 256;
}

/// The rest of a workspace after its first `used` bytes.
inline Workspace behind(const Workspace& w, size_t used) {
  check<ShapeError>(w.bytes >= used, "[linear_of_blocks] workspace too small: ", w.bytes, " bytes");
  return {static_cast<char*>(w.data) + used, w.bytes - used};
}

}  // namespace sheaf::kernels
