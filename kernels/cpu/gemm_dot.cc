#include "sheaf/kernels/cpu/dot_blocks.h"
#include "sheaf/kernels/cpu/gemm_bf16.h"
#include "sheaf/kernels/cpu/gemm_squares.h"

namespace sheaf::kernels::cpu::dot {
namespace {

using squares::Rows;
using squares::Square;

/// A square is four blocks of 8 rows; only blocks with rows that count are multiplied.
struct Dots {
  using Scope = dot::Scope;
  static constexpr int64_t kBlockSteps = 8;  // a side is 16 KiB
  static constexpr int64_t kRoom = 256;      // half a MiB: the second-level cache may have no more than one

  template <class F>
  static void multiply(int64_t steps, int64_t rows, Rows a, const char* b,
                       const Square* from, Square to, F&& between) {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    int64_t done = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      for (; done * blocks < (block + 1) * steps; ++done) between();
      const int64_t row = block * kRows;
      multiply_rows(steps, a.data + row * a.stride, a.stride, a.step, b, 128,
                    from ? from->data + row * from->stride : nullptr, from ? from->stride : 0,
                    to.data + row * to.stride, to.stride);
    }
  }
};

}  // namespace

size_t gemm_scratch(const GemmPart& p) { return squares::scratch_bytes<Dots>(p); }
void gemm(const GemmPart& p, void* scratch) { squares::run<Dots>(p, scratch); }

}  // namespace sheaf::kernels::cpu::dot
