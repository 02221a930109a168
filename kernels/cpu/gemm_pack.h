// How an operand of a product by squares (gemm_squares.h) is packed.
#pragma once

#include <algorithm>
#include <cstring>

#include "sheaf/kernels/cpu/bf16_pairs.h"

namespace sheaf::kernels::cpu::squares {

inline constexpr int64_t kSide = 32;         ///< rows and columns of a square of c; depth of one step
inline constexpr int64_t kStepBytes = 2048;  ///< of a side over one step

/// An operand as lanes (rows of a, columns of b) along the depth.
struct Sides {
  const uint16_t* data;
  int64_t lanes, depth, lane_stride, depth_stride;
  bool pairs;  ///< b: products need its lanes adjacent, in pairs of the depth
};

inline __mmask32 first_of_32(int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

/// 32 words of row `row` of a block that has `rows` rows of `width` words; zeros elsewhere.
inline __m512i edge(const uint16_t* from, int64_t stride, int64_t row, int64_t rows, __mmask32 width) {
  return row < rows ? _mm512_maskz_loadu_epi16(width, from + row * stride) : _mm512_setzero_si512();
}

/// Packs lanes [lane, lane + 32) over one step of the depth, 2 KiB; zeros past the ends.
/// a: [32 lanes][32 of the depth]. b: [16 pairs of the depth][32 lanes].
inline __attribute__((noinline)) void pack_step(const Sides& o, int64_t lane, int64_t depth, char* to) {
  const uint16_t* from = o.data + lane * o.lane_stride + depth * o.depth_stride;
  const int64_t lanes = std::min(kSide, o.lanes - lane), deep = std::min(kSide, o.depth - depth);
  alignas(64) uint16_t whole[kSide * kSide];
  int64_t stride = o.depth_stride == 1 ? o.lane_stride : o.depth_stride;
  const bool along_depth = o.depth_stride == 1, along_lanes = !along_depth && o.lane_stride == 1;
  if (!along_depth && !along_lanes) {
    std::memset(whole, 0, sizeof whole);
    for (int64_t l = 0; l < lanes; ++l)
      for (int64_t d = 0; d < deep; ++d) whole[l * kSide + d] = from[l * o.lane_stride + d * o.depth_stride];
    from = whole, stride = kSide;
  } else if (lanes < kSide || deep < kSide) {
    const int64_t rows = along_depth ? lanes : deep;
    const __mmask32 width = first_of_32(along_depth ? deep : lanes);
    for (int64_t r = 0; r < kSide; ++r) _mm512_store_si512(whole + r * kSide, edge(from, stride, r, rows, width));
    from = whole, stride = kSide;
  }
  if (along_lanes) {
    alignas(64) char pairs[kStepBytes];
    char* at = o.pairs ? to : pairs;
    for (int64_t d = 0; d < kSide; d += 2)
      interleave(_mm512_loadu_si512(from + d * stride), _mm512_loadu_si512(from + (d + 1) * stride), at + d * 64);
    if (!o.pairs)
      for (int64_t half = 0; half < 2; ++half)
        transpose_words_16x16(pairs + half * 64, 128, to + half * 1024, 64);
  } else if (o.pairs) {
    for (int64_t half = 0; half < 2; ++half)
      transpose_words_16x16(from + half * 16 * stride, stride * 2, to + half * 64, 128);
  } else {
    for (int64_t l = 0; l < kSide; ++l) _mm512_store_si512(to + l * 64, _mm512_loadu_si512(from + l * stride));
  }
}

}  // namespace sheaf::kernels::cpu::squares
