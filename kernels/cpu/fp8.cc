#include "sheaf/kernels/fp8.h"

#include <algorithm>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int64_t kChunk = 256;

/// f(chunk of floats, elements, where it begins) along a row.
template <class T, class F>
SHEAF_INLINE void for_chunks(const T* row, int64_t n, F f) {
  alignas(64) float chunk[kChunk];
  for (int64_t at = 0; at < n; at += kChunk) {
    const int64_t size = std::min(kChunk, n - at);
    for_lanes(size, [&](int64_t i, auto m) { store_lanes(chunk + i, load_lanes(row + at + i, m), m); });
    f(chunk, size, at);
  }
}

template <class T>
void round_row(const T* from, T* to, int64_t n) {
  uint32_t largest = 0;  // the order of magnitudes is that of their bits, NaN last
  for_chunks(from, n, [&](const float* chunk, int64_t size, int64_t) {
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(chunk[i]) & 0x7fffffffu);
  });
  const auto scale = std::bit_cast<float>(fp8_scale_bits(largest)), inverse = std::bit_cast<float>(fp8_inverse_bits(largest));
  for_chunks(from, n, [&](float* chunk, int64_t size, int64_t at) {
    for (int64_t i = 0; i < size; ++i) {
      const float x = chunk[i] * inverse, round = std::bit_cast<float>(fp8_rounding_bits(std::bit_cast<uint32_t>(x)));
      chunk[i] = ((x + round) - round) * scale;
    }
    for_lanes(size, [&](int64_t i, auto m) { store_lanes(to + at + i, load_lanes(chunk + i, m), m); });
  });
}

}  // namespace

void round_to_fp8(const View& from, const View& to) {
  check_fp8(from, to);
  if (from.numel() == 0) return;
  const bool dense = from.strides.back() == 1 || from.shape.back() == 1;
  if (!dense) copy(from, to);
  visit_floating("fp8", to.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      const Rows<const T> rows("fp8", dense ? from : to);
      const Rows<T> out("fp8", to);
      parallel_for(rows.count(), row_grain(2 * rows.cols()), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) round_row(rows[r], out[r], rows.cols());
      });
    }
  });
}

}  // namespace sheaf::kernels::cpu
