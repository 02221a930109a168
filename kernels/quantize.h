// Conversion of numbers to blocks (core/block_format.h) and back.
#pragma once

#include <optional>
#include <span>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// Checks dequantize()'s operands.
inline void check_blocks(const View& blocks, BlockFormat format, const View& out) {
  const int64_t bytes = block_bytes(format);
  check<DTypeError>(blocks.dtype == kU8, "[dequantize] blocks are u8, not ", blocks.dtype);
  check<ShapeError>(blocks.contiguous() && out.contiguous() && blocks.numel() % bytes == 0 &&
                        blocks.numel() / bytes * kBlockSize == out.numel(),
                    "[dequantize] ", name(format), " blocks ", blocks.shape, " into ", out.shape);
}

/// Checks the operands of to_int8_blocks() and sum_of_blocks(): `parts` blocks for every 64 of `values`.
inline void check_int8_blocks(const char* who, const View& blocks, const View& values,
                              int64_t parts) {
  check<DTypeError>(blocks.dtype == kU8, '[', who, "] blocks are u8, not ", blocks.dtype);
  const int64_t bytes = block_bytes(BlockFormat::int8);
  check<ShapeError>(blocks.contiguous() && values.contiguous() && parts > 0 &&
                        values.numel() % kBlockSize == 0 &&
                        values.numel() / kBlockSize * bytes * parts == blocks.numel(),
                    '[', who, "] int8 blocks ", blocks.shape, " and values ", values.shape);
}

// [Note: int8 by chance] The format in which ranks send values. Weights are rounded to the nearest code. Gradients below half the
// spacing of codes would always be lost that way, so they are rounded stochastically: the mean of a code is the value. For that the
// scale is rounded up, so that no code exceeds 127. The noise is a hash of the block's content, of the value's index in it and of a
// key, such as the rank: equal values get independent errors, and the same block gives the same codes wherever it is stored, on any
// device.

/// The scale (bf16) of int8 codes for values up to `largest` (its bits); 0 if it would be less than 2^-100, so that subnormal
/// numbers, which CPUs treat as 0, never become codes; NaN if one of the values is not finite. `part`: the bits of largest * (1 /
/// 127.0f).
SHEAF_HOST_DEVICE inline uint16_t scale_for_sending(uint32_t largest, uint32_t part) {
  if (largest >= 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>(part < 0x0d800000u ? 0 : (part + 0xffff) >> 16);
}
/// An f32's bits as they enter the noise: 0 for subnormal numbers, which CPUs treat as 0.
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

/// values, a multiple of 64, to blocks, dense. The scale of a block is its largest magnitude (int8: a 127th of it), rounded to bf16;
/// each code is the one whose value is nearest, of two the smaller (int8: the even one). Quantizing f32 values returned by
/// dequantize() yields the same blocks, except for scales near the smallest possible. False if a value is not finite: its block is
/// then meaningless.
bool quantize(std::span<const float> values, BlockFormat format, uint8_t* blocks);

/// blocks[..] u8, dense, whole blocks, to out[..], dense, floating, 64 elements per block: products in f32, rounded
/// to out's type.
void dequantize(const View& blocks, BlockFormat format, const View& out);

/// values[..], dense, floating, a multiple of 64, to int8 blocks, dense: stochastically with a key, else to the
/// nearest code, of two the larger. A block with a value that is not finite becomes NaN.
void to_int8_blocks(const View& values, std::optional<uint32_t> key, const View& blocks);

/// out[i] = (b0[i] + b1[i]) + ..., in f32, of `parts` equal parts of int8 blocks, one after another; rounded to out's type once.
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
