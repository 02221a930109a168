// Block formats: 64 consecutive numbers of a row are stored as a scale and 64 small codes. A tensor in blocks is a tensor of bytes
// (u8): values [.., columns] become [.., columns / 64 · block_bytes(format)], so it is sharded, gathered, saved and loaded like any
// other, and a cut between whole blocks is one between whole values.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "sheaf/core/shape.h"

namespace sheaf {

enum class BlockFormat : uint8_t {
  int8,  ///< 66 bytes: scale (bf16), 64 codes in [-127, 127]; a value is code · scale. 8.25 bits an element
  nf4,   ///< 34 bytes: scale (bf16), 32 bytes, of which byte j has codes j (low half) and j + 32; kNf4Levels[code] · scale. 4.25 bits
};

inline constexpr int64_t kBlockSize = 64;  ///< elements of a block

/// 4-bit NormalFloat: sixteen numbers in [-1, 1], 0 among them, equally likely for normally distributed values (Dettmers et al.,
/// QLoRA, https://arxiv.org/abs/2305.14314, appendix E).
inline constexpr std::array<float, 16> kNf4Levels = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

constexpr int64_t block_bytes(BlockFormat f) { return f == BlockFormat::int8 ? 66 : 34; }
constexpr std::string_view name(BlockFormat f) { return f == BlockFormat::int8 ? "int8" : "nf4"; }
/// The format of this name; else a ConfigError of `who` that lists the known ones.
BlockFormat block_format_from(std::string_view who, std::string_view text);

/// The shape of a tensor of bytes that holds one of shape `values` in blocks; ShapeError if its row length is no multiple of
/// 64.
Shape blocks_shape(const Shape& values, BlockFormat format);
/// And back; ShapeError if its rows are not whole blocks.
Shape values_shape(const Shape& blocks, BlockFormat format);

}  // namespace sheaf
