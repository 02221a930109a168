#include "sheaf/kernels/cpu/amx_tiles.h"
#include "sheaf/kernels/cpu/gemm_bf16.h"
#include "sheaf/kernels/cpu/gemm_squares.h"

namespace sheaf::kernels::cpu::amx {
namespace {

using squares::kStepBytes;
using squares::Rows;
using squares::Square;

inline void load_square(Square s) {
  _tile_loadd(0, s.data, s.stride);
  _tile_loadd(1, s.data + 64, s.stride);
  _tile_loadd(2, s.data + 16 * s.stride, s.stride);
  _tile_loadd(3, s.data + 16 * s.stride + 64, s.stride);
}
inline void store_square(Square s) {
  _tile_stored(0, s.data, s.stride);
  _tile_stored(1, s.data + 64, s.stride);
  _tile_stored(2, s.data + 16 * s.stride, s.stride);
  _tile_stored(3, s.data + 16 * s.stride + 64, s.stride);
}

/// A square is two by two tiles.
struct Tiles {
  using Scope = amx::Scope;
  static constexpr int64_t kBlockSteps = 8;  // a side is 16 KiB
  static constexpr int64_t kRoom = 512;      // 1 MiB of the 2 that these machines have

  template <class F>
  static void multiply(int64_t steps, int64_t, Rows a, const char* b, const Square* from,
                       Square to, F&& between) {
    __asm__ volatile("" ::: "memory");  // as in amx_tiles.h
    if (from) {
      load_square(*from);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, a.data += a.step, b += kStepBytes) {
      _tile_loadd(4, a.data, a.stride);
      _tile_loadd(6, b, 128);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 64, 128);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a.data + 16 * a.stride, a.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      between();
    }
    store_square(to);
    __asm__ volatile("" ::: "memory");
  }
};

}  // namespace

size_t gemm_scratch(const GemmPart& p) { return squares::scratch_bytes<Tiles>(p); }
void gemm(const GemmPart& p, void* scratch) { squares::run<Tiles>(p, scratch); }

}  // namespace sheaf::kernels::cpu::amx
