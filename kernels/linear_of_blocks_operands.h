// How the kernels of linear_of_blocks() make values of a weight in their workspace.
#pragma once

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The weight [O, I] of x's dtype that `blocks` stand for, dense at `data`.
inline View weight_of_blocks(const View& x, const View& blocks, BlockFormat format, void* data) {
  check<DTypeError>(blocks.dtype == kU8, "[linear_of_blocks] blocks are u8, not ", blocks.dtype);
  check<ShapeError>(blocks.rank() == 2 && blocks.contiguous(), "[linear_of_blocks] blocks ",
                    blocks.shape, " must be a dense matrix");
  return View::dense(data, x.dtype, values_shape(blocks.shape, format));
}

/// Bytes that it takes, so that what lies behind it is aligned.
inline size_t weight_bytes(const View& weight) {
  return (static_cast<size_t>(weight.bytes()) + 255) / 256 * 256;
}

/// What of a workspace lies behind the first `used` bytes.
inline Workspace behind(const Workspace& w, size_t used) {
  check<ShapeError>(w.bytes >= used, "[linear_of_blocks] workspace too small: ", w.bytes, " bytes");
  return {static_cast<char*>(w.data) + used, w.bytes - used};
}

}  // namespace sheaf::kernels
