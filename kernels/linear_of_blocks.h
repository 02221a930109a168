// The linear layer of a weight in blocks, without the values of the weight in memory where rows are few.
#pragma once

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// y[.., O] = x[.., I] · Wᵀ + bias[O], without a bias View{}; `blocks` [O, I / 64 · block_bytes]
/// u8, dense, are W. The bits of dequantize() and linear(). In f32 the values of up to 4 rows, as
/// where a token is generated, are never in memory, those of up to 32 in the cache alone; else
/// values of W are made in the workspace.
size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y);
void linear_of_blocks(const View& x, const View& blocks, BlockFormat format, const View& bias,
                      const View& y, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: values of W are made in the workspace.
namespace cuda {

size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y);
void linear_of_blocks(const Stream& stream, const View& x, const View& blocks, BlockFormat format,
                      const View& bias, const View& y, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
