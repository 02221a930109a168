// Rows rounded to FP8 (kernels/fp8.h) on a GPU: to codes and scales, or to the values that these encode. The numbers equal the CPU's.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/kernels/fp8.h"

namespace sheaf::kernels::cuda {

/// False if neither the last dimension of v[.., R, K] is dense nor the one before it.
bool can_round_to_fp8(const View& v);
/// Bytes of scratch memory for the two functions below.
size_t round_to_fp8_workspace(const View& from);

/// codes[.., R, P], u8, dense, and scales[.., R], of from[.., R, K]: P is K rounded up to 16, and codes after the
/// K-th are 0 (NaN in a row of NaN).
void to_fp8_codes(const Stream& stream, const View& from, uint8_t* codes, float* scales,
                  Workspace workspace);
constexpr int64_t fp8_pitch(int64_t depth) { return (depth + 15) / 16 * 16; }

/// As the CPU's. Operands that cannot be rounded directly are first copied to `to`.
void round_to_fp8(const Stream& stream, const View& from, const View& to, Workspace workspace);

}  // namespace sheaf::kernels::cuda
