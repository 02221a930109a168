// FP8: rows as numbers of 8 bits (E4M3: a sign, four bits of exponent, three of mantissa, the largest 448), with one scale per row.
// Products round their operands to it, the rows of the first and the columns of the second, to multiply at twice the rate of bf16.
//
// [Note: FP8 by rows] A row's scale is the least power of two for which its largest magnitude divided by the scale is at most 448. It
// depends only on the row, and so do the rounded values: how a batch or the outputs of a layer are sharded changes them as little as
// in any other dtype. If the summed dimension is sharded, each part of a row has its own, finer scale. A power of two as scale causes
// no rounding, and the rounded values are exact in bf16: a CPU, or a GPU without such products, multiplies those, and its sums differ
// from those of codes only by the order of addition.
#pragma once

#include <bit>
#include <cstdint>

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/gemm.h"

namespace sheaf::kernels {

/// Checks operands of rounding to FP8: f32, bf16 or f16 of the same shape, `to` dense, or dense with its last two
/// dimensions exchanged.
inline void check_fp8(const View& from, const View& to) {
  check<DTypeError>(from.dtype == to.dtype && is_floating(from.dtype) && from.dtype != kF64,
                    "[fp8] rounds f32, bf16 and f16, not ", from.dtype, " to ", to.dtype);
  check<ShapeError>(from.rank() >= 1 && from.shape == to.shape &&
                        (to.contiguous() || (to.rank() > 1 && transposed(to).contiguous())),
                    "[fp8] ", from.shape, " into ", to.shape, " of strides ", to.strides);
}

/// The biased exponent of an f32, the scale of a row whose largest magnitude has these bits: values are codes times it. At least
/// 2^-100, so that no intermediate value is subnormal.
SHEAF_HOST_DEVICE inline uint32_t fp8_scale_exponent(uint32_t largest) {
  constexpr uint32_t kOf448 = 8, kMantissa = 0x600000;  // 448 = 1.75 * 2^8
  const uint32_t exponent = (largest >> 23) + ((largest & 0x7fffff) > kMantissa ? 1 : 0);
  return exponent < 27 + kOf448 ? 27 : exponent - kOf448;
}
/// The bits of the scale, and of 1 / scale; NaN if a value of the row is not finite, which makes the whole row NaN.
SHEAF_HOST_DEVICE inline uint32_t fp8_scale_bits(uint32_t largest) {
  return largest >= 0x7f800000u ? 0x7fc00000u : fp8_scale_exponent(largest) << 23;
}
SHEAF_HOST_DEVICE inline uint32_t fp8_inverse_bits(uint32_t largest) {
  return largest >= 0x7f800000u ? 0x7fc00000u : (254 - fp8_scale_exponent(largest)) << 23;
}

/// The bits of a number whose ulp is the spacing of codes at x: x + it - it is x, |x| <= 448, rounded to the nearest code, ties to
/// even.
SHEAF_HOST_DEVICE inline uint32_t fp8_rounding_bits(uint32_t bits) {
  constexpr uint32_t kLeast = 127 - 6;  // below 2^-6 codes are evenly spaced
  const uint32_t exponent = bits >> 23 & 255;
  return ((exponent > kLeast ? exponent : kLeast) + 20) << 23 | 0x400000;
}

/// The code of an already rounded value with these bits; 0x7f for NaN.
SHEAF_HOST_DEVICE inline uint8_t fp8_code(uint32_t bits) {
  const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size >= 0x7f800000u) return 0x7f;
  if (size >= (127u - 6) << 23)
    return static_cast<uint8_t>(sign | ((size >> 20) - ((127 - 7) << 3)));
  // A multiple of 2^-9, at most seven of them: the mantissa with its leading 1, shifted into place.
  const uint32_t shift = 127 - 9 + 23 - (size >> 23);
  const uint32_t code = shift > 23 ? 0 : ((size & 0x7fffff) | 0x800000) >> shift;
  return static_cast<uint8_t>(sign | code);
}
/// The value of a code.
inline float fp8_value(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  const float size = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                   : std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
  return code & 0x80 ? -size : size;
}

namespace cpu {

/// to[.., K] = from[.., K], each row rounded to FP8, whether rows or columns are dense in `to`. `from` has any
/// strides, and may be `to`. Near a dtype's largest number rounding may overflow.
void round_to_fp8(const View& from, const View& to);

}  // namespace cpu
}  // namespace sheaf::kernels
