// Compiled twice ([Note: two builds of one kernel] in simd.h). Sums are those of the product by vectors:
// [Note: the bits of a product] in gemm_part.h.
#include "sheaf/kernels/cpu/block_rows.h"

#include <algorithm>

#include <immintrin.h>

#include "sheaf/kernels/cpu/block_values.h"
#include "sheaf/kernels/cpu/gemm_part.h"
#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;
using L = Lanes<float>;


/// Transposes sixteen bytes of each of sixteen rows into one vector per byte position: four perfect shuffles.
SHEAF_INLINE void transpose_bytes(const uint8_t* const* rows, int64_t at, uint8_t* to) {
  __m128i a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
  const auto shuffle = [](const __m128i* from, __m128i* out) __attribute__((always_inline)) {
    for (int i = 0; i < kLanes / 2; ++i) {
      out[2 * i] = _mm_unpacklo_epi8(from[i], from[i + kLanes / 2]);
      out[2 * i + 1] = _mm_unpackhi_epi8(from[i], from[i + kLanes / 2]);
    }
  };
  shuffle(a, b), shuffle(b, a), shuffle(a, b), shuffle(b, a);
  for (int i = 0; i < kLanes; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(to) + i, a[i]);
}

#ifdef __AVX512F__
SHEAF_INLINE __m128i sixteen(const uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
SHEAF_INLINE L int8_lanes(const uint8_t* codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(codes))); }
struct Levels {
  __m512 all = _mm512_loadu_ps(kNf4Levels.data());
  template <int kShift>
  SHEAF_INLINE L lanes(const uint8_t* codes) const {  // four bits of each byte; the permutation ignores the others
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(sixteen(codes)), kShift), all);
  }
};
#else
SHEAF_INLINE __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
SHEAF_INLINE L int8_lanes(const uint8_t* codes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(codes))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(codes + 8)))};
}
struct Levels {
  __m256 low = _mm256_loadu_ps(kNf4Levels.data()), high = _mm256_loadu_ps(kNf4Levels.data() + 8);
  template <int kShift>
  SHEAF_INLINE __m256 of(const uint8_t* codes) const {
    const __m256i index = _mm256_srli_epi32(_mm256_cvtepu8_epi32(eight(codes)), kShift);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 says which half
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
  }
  template <int kShift>
  SHEAF_INLINE L lanes(const uint8_t* codes) const {
    return {of<kShift>(codes), of<kShift>(codes + 8)};
  }
};
#endif

/// Sixteen outputs of the weight: where their rows are, and the codes and scales of their current blocks, in the first-level cache.
template <BlockFormat kFormat>
struct OutputLanes {
  static constexpr int kCodes = static_cast<int>(block_bytes(kFormat)) - 2;
  const uint8_t* rows[kLanes];
  const uint8_t* ahead;
  alignas(64) uint8_t codes[kCodes * kLanes];
  L scale;

  void start(const BlockRows& p, int64_t first) {
    for (int i = 0; i < kLanes; ++i) rows[i] = p.blocks + std::min(first + i, p.outputs - 1) * p.row_bytes;
    ahead = p.blocks + (first + BlockRows::kOutputs) * p.row_bytes;
  }
  SHEAF_INLINE void next_block() {
    alignas(64) float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) scales[i] = block_scale(rows[i]);
    for (int at = 0; at < kCodes; at += 16) transpose_bytes(rows, 2 + at, codes + at * kLanes);
    for (const uint8_t*& row : rows) row += block_bytes(kFormat);
    scale = L::load(scales);
    // Hardware does not recognise this many short pieces as streams: so equally many bytes of the next outputs are prefetched.
    for (int i = 0; i < kLanes * block_bytes(kFormat); i += 64) __builtin_prefetch(ahead + i);
    ahead += kLanes * block_bytes(kFormat);
  }
};

// A sum is one chain of additions: for one row, two vectors of outputs are computed together, so that each chain waits less.
template <int kRows, int kVectors, BlockFormat kFormat>
void multiply(const BlockRows& p, int64_t first) {
  constexpr int kHalf = static_cast<int>(kBlockSize / 2);
  OutputLanes<kFormat> weights[kVectors];
  for (int v = 0; v < kVectors; ++v) weights[v].start(p, first + v * kLanes);
  [[maybe_unused]] const Levels levels;
  L sums[kVectors][kRows];
  for (int64_t begin = 0; begin < p.inputs; begin += kDepthBlock) {
    for (auto& of_vector : sums)
      for (L& sum : of_vector) sum = L(0.0f);
    for (int64_t k = begin; k < std::min(begin + kDepthBlock, p.inputs); k += kBlockSize) {
      for (auto& w : weights) w.next_block();
      const float* x = p.x + k;
      const auto add = [&](int i, const auto& codes) __attribute__((always_inline)) {
        L values[kVectors];
        for (int v = 0; v < kVectors; ++v) values[v] = codes(weights[v].codes) * weights[v].scale;
        for (int m = 0; m < kRows; ++m) {
          const L input(x[m * p.inputs + i]);
          for (int v = 0; v < kVectors; ++v) sums[v][m] = fma(input, values[v], sums[v][m]);
        }
      };
      if constexpr (kFormat == BlockFormat::int8) {
        for (int i = 0; i < kBlockSize; ++i)
          add(i, [&](const uint8_t* codes) __attribute__((always_inline)) {
            return int8_lanes(codes + i * kLanes);
          });
      } else {
        for (int i = 0; i < kHalf; ++i)
          add(i, [&](const uint8_t* codes) __attribute__((always_inline)) {
            return levels.lanes<0>(codes + i * kLanes);
          });
        for (int i = 0; i < kHalf; ++i)
          add(kHalf + i, [&](const uint8_t* codes) __attribute__((always_inline)) {
            return levels.lanes<4>(codes + i * kLanes);
          });
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes;
      const int count = static_cast<int>(std::min<int64_t>(kLanes, p.outputs - at));
      for (int m = 0; m < kRows; ++m) {
        float* y = p.y + m * p.outputs + at;
        const float* addend = begin > 0 ? y : p.bias ? p.bias + at : nullptr;
        (addend ? sums[v][m] + L::load(addend, count) : sums[v][m]).store(y, count);
      }
    }
  }
}

template <int kRows, BlockFormat kFormat>
void multiply_outputs(const BlockRows& p, int64_t first) {
  static_assert(BlockRows::kOutputs == 2 * kLanes);
  const bool two = first + kLanes < p.outputs;
  if (kRows == 1 && two) return multiply<kRows, 2, kFormat>(p, first);
  multiply<kRows, 1, kFormat>(p, first);
  if (two) multiply<kRows, 1, kFormat>(p, first + kLanes);
}

template <int kRows>
void multiply_rows(const BlockRows& p, int64_t first) {
  p.format == BlockFormat::int8 ? multiply_outputs<kRows, BlockFormat::int8>(p, first)
                                : multiply_outputs<kRows, BlockFormat::nf4>(p, first);
}

}  // namespace

void multiply_blocks(const BlockRows& p, int64_t first) {
  switch (p.rows) {
    case 1: return multiply_rows<1>(p, first);
    case 2: return multiply_rows<2>(p, first);
    case 3: return multiply_rows<3>(p, first);
    default: return multiply_rows<4>(p, first);
  }
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
