// Numbers in blocks (core/block_format.h): into them, and back.
#pragma once

#include <span>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// values, a multiple of 64, to blocks, dense. The scale of a block is its largest magnitude (of
/// int8 the 127th part), rounded to bf16; each code is the one whose value is nearest, of two the
/// smaller (int8: the even one). Blocks of what dequantize() gives are the same blocks. False if a
/// value is not finite: its block is then meaningless.
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
