// Numbers in blocks (core/block_format.h): into them, and back.
#pragma once

#include <span>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// What dequantize() refuses.
inline void check_blocks(const View& blocks, BlockFormat format, const View& out) {
  const int64_t bytes = block_bytes(format);
  check<DTypeError>(blocks.dtype == kU8, "[dequantize] blocks are u8, not ", blocks.dtype);
  check<ShapeError>(blocks.contiguous() && out.contiguous() && blocks.numel() % bytes == 0 &&
                        blocks.numel() / bytes * kBlockSize == out.numel(),
                    "[dequantize] ", name(format), " blocks ", blocks.shape, " into ", out.shape);
}

namespace cpu {

/// values, a multiple of 64, to blocks, dense. The scale of a block is its largest magnitude (of
/// int8 the 127th part), rounded to bf16; each code is the one whose value is nearest, of two the
/// smaller (int8: the even one). Blocks of f32 that dequantize() gives are the same blocks, but for
/// scales next to the smallest there are. False if a value is not finite: its block then means
/// nothing.
bool quantize(std::span<const float> values, BlockFormat format, uint8_t* blocks);

/// blocks[..] u8, dense, whole blocks, to out[..], dense, floating, 64 elements of each: products
/// in f32, rounded to out's type.
void dequantize(const View& blocks, BlockFormat format, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: the same bits.
namespace cuda {

void dequantize(const Stream& stream, const View& blocks, BlockFormat format, const View& out);

}  // namespace cuda
}  // namespace sheaf::kernels
