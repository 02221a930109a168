#include "sheaf/kernels/fp8.h"

#include <algorithm>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int64_t kChunk = 256;

/// f(chunk of floats, elements, its offset) along a row.
template <class T, class F>
SHEAF_INLINE void for_chunks(const T* row, int64_t n, F f) {
  alignas(64) float chunk[kChunk];
  for (int64_t at = 0; at < n; at += kChunk) {
    const int64_t size = std::min(kChunk, n - at);
    for_lanes(size, [&](int64_t i, auto m) { store_lanes(chunk + i, load_lanes(row + at + i, m), m); });
    f(chunk, size, at);
  }
}

SHEAF_INLINE float rounded(float value, float scale, float inverse) {
  const float x = value * inverse, round = std::bit_cast<float>(fp8_rounding_bits(std::bit_cast<uint32_t>(x)));
  return ((x + round) - round) * scale;
}

template <class T>
void round_row(const T* from, T* to, int64_t n) {
  uint32_t largest = 0;  // magnitudes are ordered as their bits, NaN last
  for_chunks(from, n, [&](const float* chunk, int64_t size, int64_t) {
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(chunk[i]) & 0x7fffffffu);
  });
  const auto scale = std::bit_cast<float>(fp8_scale_bits(largest)), inverse = std::bit_cast<float>(fp8_inverse_bits(largest));
  for_chunks(from, n, [&](float* chunk, int64_t size, int64_t at) {
    for (int64_t i = 0; i < size; ++i) chunk[i] = rounded(chunk[i], scale, inverse);
    for_lanes(size, [&](int64_t i, auto m) { store_lanes(to + at + i, load_lanes(chunk + i, m), m); });
  });
}

/// `rows` adjacent rows, in lines of `depth`; each is rounded as by round_row().
template <class T>
void round_lines(const Rows<const T>& from, const Rows<T>& to, int64_t line, int64_t depth, int64_t first, int64_t rows) {
  uint32_t largest[kChunk] = {};
  float scale[kChunk], inverse[kChunk];
  for (int64_t k = 0; k < depth; ++k)
    for_chunks(from[line + k] + first, rows, [&](const float* chunk, int64_t size, int64_t) {
      for (int64_t i = 0; i < size; ++i) largest[i] = std::max(largest[i], std::bit_cast<uint32_t>(chunk[i]) & 0x7fffffffu);
    });
  for (int64_t i = 0; i < rows; ++i)
    scale[i] = std::bit_cast<float>(fp8_scale_bits(largest[i])), inverse[i] = std::bit_cast<float>(fp8_inverse_bits(largest[i]));
  for (int64_t k = 0; k < depth; ++k)
    for_chunks(from[line + k] + first, rows, [&](float* chunk, int64_t size, int64_t) {
      for (int64_t i = 0; i < size; ++i) chunk[i] = rounded(chunk[i], scale[i], inverse[i]);
      for_lanes(size, [&](int64_t i, auto m) { store_lanes(to[line + k] + first + i, load_lanes(chunk + i, m), m); });
    });
}

bool in_rows(const View& v) { return v.strides.back() == 1 || v.shape.back() == 1; }

template <class T>
void round_all(const View& from, const View& to) {
  if (to.contiguous()) {
    const Rows<const T> rows("fp8", from);
    const Rows<T> out("fp8", to);
    return parallel_for(rows.count(), row_grain(2 * rows.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) round_row(rows[r], out[r], rows.cols());
    });
  }
  const Rows<const T> lines("fp8", transposed(from));
  const Rows<T> out("fp8", transposed(to));
  const int64_t depth = from.shape.back(), chunks = (lines.cols() + kChunk - 1) / kChunk;
  parallel_for(lines.count() / depth * chunks, row_grain(2 * depth * kChunk), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % chunks * kChunk;
      round_lines(lines, out, i / chunks * depth, depth, first, std::min(kChunk, lines.cols() - first));
    }
  });
}

}  // namespace

void round_to_fp8(const View& from, const View& to) {
  check_fp8(from, to);
  if (from.numel() == 0) return;
  const bool as_it_lies = in_rows(to.contiguous() ? from : transposed(from));
  if (!as_it_lies) copy(from, to);
  visit_floating("fp8", to.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) round_all<T>(as_it_lies ? from : to, to);
  });
}

}  // namespace sheaf::kernels::cpu
