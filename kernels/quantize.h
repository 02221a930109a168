// Numbers in blocks (core/block_format.h): into them, and back.
#pragma once

#include <optional>
#include <span>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/random.h"
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

/// What to_int8_blocks() and sum_of_blocks() refuse: `parts` blocks for each 64 of `values`.
inline void check_int8_blocks(const char* who, const View& blocks, const View& values,
                              int64_t parts) {
  check<DTypeError>(blocks.dtype == kU8, '[', who, "] blocks are u8, not ", blocks.dtype);
  const int64_t bytes = block_bytes(BlockFormat::int8);
  check<ShapeError>(blocks.contiguous() && values.contiguous() && parts > 0 &&
                        values.numel() % kBlockSize == 0 &&
                        values.numel() / kBlockSize * bytes * parts == blocks.numel(),
                    '[', who, "] int8 blocks ", blocks.shape, " and values ", values.shape);
}

// [Note: int8 by chance] What ranks send each other. Of weights codes are the nearest; gradients
// below half a code's step would always be lost so, and are rounded by chance: the mean of a code
// is the value. So that it is, the scale is rounded up: no code is beyond 127. The noise is a hash
// of what the block has in it, of the value's place there and of a key, the rank for one: equal
// values err apart, and the same block is the same wherever it lies, and on any device.

/// The bf16 that int8 codes of values up to `largest`, whose bits these are, are multiplied by; 0
/// if it were less than 2^-100, so that what has no normal number, which CPUs take for 0, is never a
/// code; NaN if one of the values is not finite. `part`: the bits of largest * (1 / 127.0f).
SHEAF_HOST_DEVICE inline uint16_t scale_for_sending(uint32_t largest, uint32_t part) {
  if (largest >= 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>(part < 0x0d800000u ? 0 : (part + 0xffff) >> 16);
}
/// An f32's bits as noise is made of them: none of what is no normal number, which CPUs take for 0.
SHEAF_HOST_DEVICE inline uint32_t bits_for_noise(uint32_t bits) {
  return (bits & 0x7f800000u) != 0 ? bits : 0;
}
/// 16 random bits of value `bits`, the i-th of a block whose values' bits add up to `block`; both
/// bits_for_noise().
SHEAF_HOST_DEVICE inline uint32_t noise_by_chance(uint32_t bits, uint32_t i, uint32_t block,
                                                  uint32_t key) {
  uint32_t x = bits + i * 0x9e3779b9u + (block * 0x85ebca6bu ^ key);  // then Wellons' lowbias32
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x >> 16;
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

/// values[..], dense, floating, a multiple of 64, to int8 blocks, dense: by chance with a key, else
/// to the nearest code, of two the larger. A block with a value that is not finite is one of NaN.
void to_int8_blocks(const View& values, std::optional<uint32_t> key, const View& blocks);

/// out[i] = (b0[i] + b1[i]) + ..., in f32, of `parts` equal parts of int8 blocks, one behind the
/// other; rounded to out's type once.
void sum_of_blocks(const View& blocks, int64_t parts, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: the same bits.
namespace cuda {

void dequantize(const Stream& stream, const View& blocks, BlockFormat format, const View& out);
void to_int8_blocks(const Stream& stream, const View& values, std::optional<uint32_t> key,
                    const View& blocks);
void sum_of_blocks(const Stream& stream, const View& blocks, int64_t parts, const View& out);

}  // namespace cuda
}  // namespace sheaf::kernels
