// Divisions on the device by a number known to the host: a multiplication and a shift. The device has no instruction for division; a
// 64-bit one is a call of some hundred instructions, for which every kernel that contains one must reserve registers.
#pragma once

#include "sheaf/kernels/cuda/launch.h"

namespace sheaf::kernels::cuda {

/// Quotients by 1 <= d < 2^62 (Granlund and Montgomery 1994, "Division by invariant integers using
/// multiplication").
class Divider {
 public:
  Divider() = default;
  explicit Divider(int64_t d) {
    const auto divisor = static_cast<uint64_t>(d);
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    const uint64_t excess = (uint64_t{1} << shift_) - divisor;
    using Wide = unsigned __int128;
    multiplier_ = static_cast<uint64_t>((Wide{excess} << 64) / divisor) + 1;
    short_multiplier_ = static_cast<unsigned>((excess << 32) / divisor) + 1;
  }
  /// floor(n / d) for 0 <= n < 2^63.
  __device__ int64_t quotient(int64_t n) const {
    const auto m = static_cast<uint64_t>(n);
    return static_cast<int64_t>((__umul64hi(m, multiplier_) + m) >> shift_);
  }
  /// The same for n, d < 2^31, in fewer instructions.
  __device__ unsigned short_quotient(unsigned n) const {
    return (__umulhi(n, short_multiplier_) + n) >> shift_;
  }

 private:
  uint64_t multiplier_ = 1;
  unsigned short_multiplier_ = 1, shift_ = 0;
};

}  // namespace sheaf::kernels::cuda
