// The linear layer of a weight in blocks; for few rows the weight's values are never in memory.
#pragma once

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// y[.., O] = x[.., I] · Wᵀ + bias[O], View{} for no bias; `blocks` [O, I / 64 · block_bytes] u8, dense, are W. The bits of
/// dequantize() and linear(). In f32, W's values are never in memory for up to 4 rows of x, as when generating a token, and only in
/// the cache for up to 32; else they are written to the workspace.
size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y);
void linear_of_blocks(const View& x, const View& blocks, BlockFormat format, const View& bias,
                      const View& y, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: W's values are written to the workspace.
namespace cuda {

size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y);
void linear_of_blocks(const Stream& stream, const View& x, const View& blocks, BlockFormat format,
                      const View& bias, const View& y, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
