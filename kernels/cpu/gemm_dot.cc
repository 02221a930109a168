#include "sheaf/kernels/cpu/gemm_bf16.h"
#include "sheaf/kernels/cpu/gemm_squares.h"

namespace sheaf::kernels::cpu::dot {
namespace {

using squares::kSide;
using squares::kStepBytes;
using squares::Square;

/// sum += x * y over pairs. As in gemm_simd.cc, so that the sums keep their registers.
inline __m512 add_product(__m512 sum, __m512i x, __m512i y) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

/// A square is four blocks of 8 rows: their 16 vectors of sums stay in registers over all steps.
struct Dots {
  struct Scope {};
  static constexpr int64_t kBlockSteps = 8;  // a side is 16 KiB
  static constexpr int64_t kRoom = 256;      // half a MiB: the second-level cache may have no more than one
  static constexpr int kRows = 8, kBlocks = kSide / kRows;

  template <class F>
  static void multiply(int64_t steps, const char* a, const char* b, const Square* from, Square to, F&& between) {
    int64_t done = 0;
    for (int block = 0; block < kBlocks; ++block) {
      for (; done * kBlocks < (block + 1) * steps; ++done) between();
      const int64_t row = block * kRows;
      multiply_rows(steps, a + row * 64, b, from ? from->data + row * from->stride : nullptr, from ? from->stride : 0,
                    to.data + row * to.stride, to.stride);
    }
  }

 private:
  static void multiply_rows(int64_t steps, const char* a, const char* b, const char* from, int64_t from_stride, char* to,
                            int64_t to_stride) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = _mm512_setzero_ps(), sums[r][1] = _mm512_setzero_ps();
      if (!from) continue;
      sums[r][0] = _mm512_loadu_ps(from + r * from_stride);
      sums[r][1] = _mm512_loadu_ps(from + r * from_stride + 64);
    }
    for (int64_t s = 0; s < steps; ++s, a += kStepBytes - 64)
      for (int pair = 0; pair < kSide / 2; ++pair, a += 4, b += 128) {
        const __m512i left = _mm512_load_si512(b), right = _mm512_load_si512(b + 64);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t word;
          std::memcpy(&word, a + r * 64, 4);
          const __m512i x = _mm512_set1_epi32(word);
          sums[r][0] = add_product(sums[r][0], x, left), sums[r][1] = add_product(sums[r][1], x, right);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(to + r * to_stride, sums[r][0]);
      _mm512_storeu_ps(to + r * to_stride + 64, sums[r][1]);
    }
  }
};

}  // namespace

size_t gemm_scratch(const GemmPart& p) { return squares::scratch_bytes<Dots>(p); }
void gemm(const GemmPart& p, void* scratch) { squares::run<Dots>(p, scratch); }

}  // namespace sheaf::kernels::cpu::dot
