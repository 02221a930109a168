// One block (core/block_format.h) as 64 values in f32.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "sheaf/core/block_format.h"
#include "sheaf/core/dtype.h"
#include "sheaf/kernels/cpu/inline.h"

namespace sheaf::kernels::cpu {

SHEAF_INLINE float block_scale(const uint8_t* block) {
  uint16_t bits;
  std::memcpy(&bits, block, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

SHEAF_INLINE void int8_values(const uint8_t* block, float* out) {
  const float scale = block_scale(block);
  const auto* codes = reinterpret_cast<const int8_t*>(block + 2);
  for (int i = 0; i < kBlockSize; ++i) out[i] = static_cast<float>(codes[i]) * scale;
}

// Looks up sixteen products, eight at a time.
SHEAF_INLINE void nf4_values(const uint8_t* block, float* out) {
  using Levels = float __attribute__((vector_size(32)));
  using Codes = int32_t __attribute__((vector_size(32)));
  using Bytes = uint8_t __attribute__((vector_size(8)));
  constexpr int kHalf = static_cast<int>(kBlockSize / 2);
  const float scale = block_scale(block);
  Levels low, high;
  std::memcpy(&low, kNf4Levels.data(), sizeof low);
  std::memcpy(&high, kNf4Levels.data() + 8, sizeof high);
  low *= scale, high *= scale;
  for (int i = 0; i < kHalf; i += 8) {
    Bytes bytes;
    std::memcpy(&bytes, block + 2 + i, sizeof bytes);
    const Codes codes = __builtin_convertvector(bytes, Codes);
    const Levels first = __builtin_shuffle(low, high, codes & 15), second = __builtin_shuffle(low, high, codes >> 4);
    std::memcpy(out + i, &first, sizeof first);
    std::memcpy(out + kHalf + i, &second, sizeof second);
  }
}

SHEAF_INLINE void block_values(const uint8_t* block, BlockFormat format, float* out) {
  format == BlockFormat::int8 ? int8_values(block, out) : nf4_values(block, out);
}

}  // namespace sheaf::kernels::cpu
