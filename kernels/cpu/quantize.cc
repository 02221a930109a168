#include "sheaf/kernels/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "sheaf/core/dtype.h"
#include "sheaf/core/error.h"
#include "sheaf/core/parallel.h"
#include "sheaf/kernels/cpu/block_values.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int kSize = static_cast<int>(kBlockSize), kHalf = kSize / 2;
constexpr int64_t kGrain = 512;  // blocks for which waking another thread pays off

// The largest magnitude; infinite or NaN if one of the values is.
float magnitude(const float* values) {
  uint32_t bits = 0;  // magnitudes are ordered as their bits, NaN last
  for (int i = 0; i < kSize; ++i) bits = std::max(bits, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(bits);
}

void quantize_int8(const float* values, float largest, uint8_t* block) {
  const bf16 rounded(largest / 127);
  const float scale = static_cast<float>(rounded);
  std::memcpy(block, &rounded, 2);
  for (int i = 0; i < kSize; ++i) {
    // A scale near the smallest possible has few bits: the largest value divided by it may exceed 127.
    const float code = scale > 0 ? std::nearbyint(std::clamp(values[i] / scale, -127.0f, 127.0f)) : 0.0f;
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(code));
  }
}

void quantize_nf4(const float* values, float largest, uint8_t* block) {
  bf16 rounded(largest);
  if (rounded.bits == 0x7f80) rounded.bits = 0x7f7f;  // to the largest finite value
  const float scale = static_cast<float>(rounded);
  std::memcpy(block, &rounded, 2);
  int32_t codes[kSize];
  for (int i = 0; i < kSize; ++i) {
    const float at = scale > 0 ? values[i] / scale : 0.0f;
    int32_t code = 0;
    for (int k = 0; k + 1 < 16; ++k) code += at > (kNf4Levels[k] + kNf4Levels[k + 1]) * 0.5f;
    codes[i] = code;
  }
  for (int i = 0; i < kHalf; ++i) block[2 + i] = static_cast<uint8_t>(codes[i] | codes[i + kHalf] << 4);
}

template <class T>
void dequantize_to(const uint8_t* from, BlockFormat format, T* to, int64_t blocks) {
  const int64_t bytes = block_bytes(format);
  parallel_for(blocks, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      alignas(64) float values[kSize];
      float* into = values;
      if constexpr (std::is_same_v<T, float>) into = to + b * kSize;
      block_values(from + b * bytes, format, into);
      if constexpr (!std::is_same_v<T, float>)
        for (int i = 0; i < kSize; ++i) to[b * kSize + i] = static_cast<T>(values[i]);
    }
  });
}

template <bool kByChance>
void to_int8_block(const float* values, uint32_t key, uint8_t* block) {
  const float largest = magnitude(values);
  const uint16_t bits = scale_for_sending(std::bit_cast<uint32_t>(largest), std::bit_cast<uint32_t>(largest * (1 / 127.0f)));
  std::memcpy(block, &bits, 2);
  const float scale = block_scale(block);
  auto* codes = reinterpret_cast<int8_t*>(block + 2);
  if (!(scale > 0)) {
    std::memset(codes, 0, kSize);
    return;
  }
  const float inverse = 1 / scale;
  uint32_t all = 0;
  for (int i = 0; kByChance && i < kSize; ++i) all += bits_for_noise(std::bit_cast<uint32_t>(values[i]));
  for (int i = 0; i < kSize; ++i) {  // plus 128, so that truncation always rounds down
    const uint32_t noise =
        kByChance ? noise_by_chance(bits_for_noise(std::bit_cast<uint32_t>(values[i])), static_cast<uint32_t>(i), all, key) : 0x8000;
    const float code = std::fma(values[i], inverse, 128 + static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-16f);
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(std::clamp(code, 1.0f, 255.0f)) - 128);
  }
}

template <class T>
void sum_to(const uint8_t* blocks, int64_t parts, T* out, int64_t count) {
  const int64_t bytes = block_bytes(BlockFormat::int8);
  parallel_for(count, kGrain / parts, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      alignas(64) float sum[kSize];
      int8_values(blocks + b * bytes, sum);
      for (int64_t part = 1; part < parts; ++part) {
        const uint8_t* block = blocks + (part * count + b) * bytes;
        const float scale = block_scale(block);
        const auto* codes = reinterpret_cast<const int8_t*>(block + 2);
        for (int i = 0; i < kSize; ++i) sum[i] = std::fma(static_cast<float>(codes[i]), scale, sum[i]);
      }
      for (int i = 0; i < kSize; ++i) out[b * kSize + i] = static_cast<T>(sum[i]);
    }
  });
}

}  // namespace

bool quantize(std::span<const float> values, BlockFormat format, uint8_t* blocks) {
  const int64_t count = static_cast<int64_t>(values.size()) / kSize, bytes = block_bytes(format);
  check<ShapeError>(std::ssize(values) % kSize == 0, "[quantize] ", values.size(), " values are no whole blocks of ", kSize);
  std::atomic<bool> finite = true;
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const float* from = values.data() + b * kSize;
      const float largest = magnitude(from);
      if (!(largest <= std::numeric_limits<float>::max())) finite = false;
      else if (format == BlockFormat::int8) quantize_int8(from, largest, blocks + b * bytes);
      else quantize_nf4(from, largest, blocks + b * bytes);
    }
  });
  return finite;
}

void dequantize(const View& blocks, BlockFormat format, const View& out) {
  check_blocks(blocks, format, out);
  visit_floating("dequantize", out.dtype, [&]<class T>() {
    dequantize_to(blocks.as<uint8_t>(), format, out.as<T>(), out.numel() / kSize);
  });
}

void to_int8_blocks(const View& values, std::optional<uint32_t> key, const View& blocks) {
  check_int8_blocks("to_int8_blocks", blocks, values, 1);
  auto* to = blocks.as<uint8_t>();
  const auto make = key ? to_int8_block<true> : to_int8_block<false>;
  visit_floating("to_int8_blocks", values.dtype, [&]<class T>() {
    const T* from = values.as<T>();
    parallel_for(values.numel() / kSize, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        alignas(64) float block[kSize];
        for (int i = 0; i < kSize; ++i) block[i] = static_cast<float>(from[b * kSize + i]);
        make(block, key.value_or(0), to + b * block_bytes(BlockFormat::int8));
      }
    });
  });
}

void sum_of_blocks(const View& blocks, int64_t parts, const View& out) {
  check_int8_blocks("sum_of_blocks", blocks, out, parts);
  visit_floating("sum_of_blocks", out.dtype, [&]<class T>() {
    sum_to(blocks.as<uint8_t>(), parts, out.as<T>(), out.numel() / kSize);
  });
}

}  // namespace sheaf::kernels::cpu
