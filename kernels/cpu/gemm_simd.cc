// The matrix product by vectors, compiled twice ([Note: two builds of one kernel] in simd.h).
//
// K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), with the inner loops exchanged: a block of
// b is packed in panels into the second-level cache; a strip of a, which is read in place if its rows are dense, stays in the
// first-level one for all panels, and c is written along its rows.
#include "sheaf/kernels/cpu/gemm_part.h"

#include <algorithm>
#include <array>
#include <utility>

#include <unistd.h>

#include "sheaf/core/view.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/transpose.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

// A tile of c is kStrip rows of kPanel vectors: accumulators that fit the registers, with room for a row of the panel.
#ifdef __AVX512F__
template <class C>
inline constexpr int kStrip = std::is_same_v<C, float> ? 8 : 4;
template <class C>
inline constexpr int kPanel = std::is_same_v<C, float> ? 3 : 2;
#else
template <class C>
inline constexpr int kStrip = std::is_same_v<C, float> ? 6 : 2;
template <class C>
inline constexpr int kPanel = 1;
#endif

// b's packed block is 1.2 MB of floats, a's 0.4 MB: both fit in a second-level cache of 2 MiB. With a smaller one, b's block is half
// as wide. The width of its blocks changes no bit.
constexpr int64_t kRowBlock = 240;
int64_t col_block() {
  static const int64_t width = sysconf(_SC_LEVEL2_CACHE_SIZE) >= (2 << 20) ? 768 : 384;
  return width;
}
// With few rows, packing b is much of the work, most of it waiting for memory. Then its blocks are narrow, so that the next one fits
// in the cache next to the packed one, and is prefetched while tiles are multiplied; with even fewer rows they are a panel wide. With
// many rows, narrow blocks would read a too often. If b's rows are dense, a narrow block consists of short pieces that may map to few
// sets of the cache: by measurement the gain is smaller, and none with few rows.
constexpr int64_t kNarrowLeastRows = 48, kNarrowMostRows = 384, kNarrowBlock = 96;
constexpr int64_t kNarrowMostRowsByRows = 256, kNarrowBlockByRows = 192;

/// Where a tile's sums are stored: c = sums, or c = sums + addend, which is c itself or the bias (stride 0).
template <class C>
struct Output {
  C* c;
  int64_t c_stride;
  bool adds;
  const C* addend;
  int64_t addend_stride;
};

/// Prefetches the next block of b into the cache, a little at a time.
class Fetch {
 public:
  Fetch() = default;
  /// `rows` rows of `bytes`, `stride` bytes apart, in `times` calls of some().
  Fetch(const void* from, int64_t stride, int64_t rows, int64_t bytes, int64_t times)
      : row_(static_cast<const char*>(from)),
        stride_(stride),
        rows_(rows),
        lines_((bytes + kLine - 1) / kLine) {
    each_ = (rows_ * lines_ + times - 1) / std::max<int64_t>(times, 1);
  }
  SHEAF_INLINE void some() {
    for (int64_t i = 0; i < each_ && rows_ > 0; ++i) {
      __builtin_prefetch(row_ + line_ * kLine, 0, 2);
      if (++line_ == lines_) line_ = 0, row_ += stride_, --rows_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* row_ = nullptr;
  int64_t stride_ = 0, rows_ = 0, lines_ = 0, each_ = 0, line_ = 0;
};

/// sum += x * y. Otherwise g++ 12 moves the sums of an unrolled loop from register to register.
#ifdef __AVX512F__
SHEAF_INLINE void add_product(Lanes<float>& sum, Lanes<float> x, Lanes<float> y) {
  asm("vfmadd231ps %1, %2, %0" : "+v"(sum.v) : "v"(x.v), "v"(y.v));
}
#else
SHEAF_INLINE void add_product(Lanes<float>& sum, Lanes<float> x, Lanes<float> y) {
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum.l) : "x"(x.l), "x"(y.l));
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum.h) : "x"(x.h), "x"(y.h));
}
#endif
SHEAF_INLINE void add_product(Lanes<double>& sum, const Lanes<double>& x, const Lanes<double>& y) { sum = fma(x, y, sum); }

constexpr int kTogether = 16;        // steps of the depth between two prefetches
constexpr int64_t kAhead = 12 * 16;  // how far ahead a single strip, which is limited by reading b, prefetches it

/// One tile: sums over `depth` of a's kRows times the panel's kVectors. `last` is the width of the last vector. A packed
/// strip is stored column by column; else its rows are a_stride apart.
template <class C, bool kPacked, int kRows, int kVectors>
void tile(int64_t depth, const C* a, int64_t a_stride, const C* b, const Output<C>& out, int last,
          Fetch& fetch) {
  using L = Lanes<C>;
  constexpr int kWidth = kVectors * kLanes;
  L sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sums[m][n] = L(C(0));
  }
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    L row[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) row[n] = L::load(b + k * kWidth + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const L x(kPacked ? a[k * kStrip<C> + m] : a[m * a_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) add_product(sums[m][n], x, row[n]);
    }
  };
  // The third-level cache is some 130 ns away. So while this tile is multiplied, data needed next is prefetched, a line at a time:
  // the next tile of c, the rows of a if they are not adjacent, and some of the next block of b.
  const C* next = out.c + kWidth;
  int64_t k = 0;
  for (int column = 0; k + kTogether <= depth; k += kTogether) {
    fetch.some();
    __builtin_prefetch(next + column * kLanes, 1);
    if (++column == kVectors) column = 0, next += out.c_stride;
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      if (!kPacked) __builtin_prefetch(a + m * a_stride + k + kTogether);
      step(k + 2 * m), step(k + 2 * m + 1);
    }
    for (int i = 2 * kRows; i < kTogether; ++i) step(k + i);
  }
  for (; k < depth; ++k) step(k);
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    C* c = out.c + m * out.c_stride;
    const C* addend = out.addend + m * out.addend_stride;
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n, c += kLanes, addend += kLanes) {
      if (n + 1 < kVectors || last == kLanes) {
        (out.adds ? sums[m][n] + L::load(addend) : sums[m][n]).store(c);
      } else {
        (out.adds ? sums[m][n] + L::load(addend, last) : sums[m][n]).store(c, last);
      }
    }
  }
}

template <class C>
using Tile = void (*)(int64_t, const C*, int64_t, const C*, const Output<C>&, int, Fetch&);

template <class C, bool kPacked, size_t... i>
constexpr auto tile_table(std::index_sequence<i...>) {
  return std::array<Tile<C>, sizeof...(i)>{tile<C, kPacked, i % kStrip<C> + 1, i / kStrip<C> + 1>...};
}
template <class C>
Tile<C> tile_for(bool packed, int64_t rows, int64_t vectors) {
  constexpr auto kAll = std::make_index_sequence<kStrip<C> * kPanel<C>>();
  static constexpr auto kDirect = tile_table<C, false>(kAll), kPackedTiles = tile_table<C, true>(kAll);
  return (packed ? kPackedTiles : kDirect)[static_cast<size_t>((vectors - 1) * kStrip<C> + rows - 1)];
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class S>
const S* element(const MatrixOperand& x, int64_t i, int64_t j) {
  return reinterpret_cast<const S*>(x.data) + i * x.row_stride + j * x.col_stride;
}
template <class C, class S>
C widened(S x) {
  return static_cast<C>(static_cast<ComputeType<S>>(x));
}

SHEAF_INLINE int lanes_left(int64_t left) { return static_cast<int>(std::clamp<int64_t>(left, 0, kLanes)); }

/// to[panel][depth][kPanel vectors] = b[k ..][n .. n + width]; the last panel has as many vectors as it needs, zeros past `width`.
/// Writes rows in multiples of sixteen. For a single panel of dense columns it prefetches data to be packed a little later, up to the
/// beginning of the `next` panel, if given.
template <class S, class C>
void pack_panels(const MatrixOperand& b, int64_t k, int64_t depth, int64_t n, int64_t width, C* to, const S* next = nullptr) {
  constexpr int64_t kWidth = kPanel<C> * kLanes;
  // By rows if those are dense: the third-level cache is far, and only long pieces of a row are prefetched by hardware.
  if (b.col_stride == 1) {
    const int64_t whole = width / kWidth * kWidth, rest = (width - whole + kLanes - 1) / kLanes;
    for (int64_t i = 0; i < depth; ++i) {
      const S* from = element<S>(b, k + i, n);
      C* out = to + i * kWidth;
      for (int64_t j = 0; j < whole; j += kWidth, out += round_up(depth, kLanes) * kWidth)
        for (int v = 0; v < kPanel<C>; ++v) load_lanes(from + j + v * kLanes).store(out + v * kLanes);
      out = to + round_up(depth, kLanes) * whole + i * rest * kLanes;
      for (int64_t j = whole; j < width; j += kLanes, out += kLanes) load_lanes(from + j, lanes_left(width - j)).store(out);
    }
    return;
  }
  for (int64_t j = 0; j < width; j += kWidth) {
    const int64_t vectors = std::min<int64_t>(kPanel<C>, (width - j + kLanes - 1) / kLanes), stride = vectors * kLanes;
    C* panel = to + round_up(depth, kLanes) * j;
    for (int64_t v = 0; v < stride; v += kLanes)
      for (int64_t i = 0; i < depth; i += kLanes) {
        const S* from = element<S>(b, k + i, n + j + v);
        const int rows = lanes_left(depth - i), cols = lanes_left(width - j - v);
        C* out = panel + i * stride + v;
        if constexpr (std::is_same_v<S, C>) {
          if (b.row_stride == 1 && rows == kLanes && cols == kLanes) {
            if (next) {
              const int64_t beyond = i + kAhead - depth;  // of these columns
              const S* at = beyond < 0 ? from + kAhead : beyond + (v + kLanes < stride ? from - i + kLanes * b.col_stride : next);
              for (int c = 0; c < kLanes; ++c) __builtin_prefetch(at + c * b.col_stride, 0, 2);
            }
            transpose_16x16(from, b.col_stride, out, stride);
            continue;
          }
        }
        C block[kLanes * kLanes] = {};
        if (b.row_stride == 1 && rows == kLanes) {
          for (int c = 0; c < cols; ++c) load_lanes(from + c * b.col_stride).store(block + c * kLanes);
        } else {
          for (int c = 0; c < cols; ++c)
            for (int r = 0; r < rows; ++r) block[c * kLanes + r] = widened<C>(from[c * b.col_stride + r * b.row_stride]);
        }
        transpose_16x16(block, kLanes, out, stride);
      }
  }
}

/// The distance between packed strips of a: one line more than a strip holds, since otherwise the strips of a usual depth would all
/// begin in the same sets of the first-level cache and evict each other while rows are distributed to them.
template <class C>
int64_t strip_stride(int64_t depth) {
  return kStrip<C> * depth + kLanes;
}

/// to[strip][depth][kStrip] = a[m .. m + rows][k ..]; a last strip of fewer rows leaves gaps.
template <class S, class C>
void pack_strips(const MatrixOperand& a, int64_t m, int64_t rows, int64_t k, int64_t depth, C* to) {
  const int64_t stride = strip_stride<C>(depth);
  for (int64_t i = 0; i < depth; ++i) {
    C* out = to + i * kStrip<C>;
    int64_t s = 0;
    if (a.row_stride == 1) {
      const S* from = element<S>(a, m, k + i);
#ifndef __AVX512F__
      // Eight at once: the two beyond the strip are written again at the next step, or lie in the gap behind it.
      if constexpr (std::is_same_v<S, float>)
        for (; s + 8 <= rows; s += kStrip<C>, out += stride) _mm256_storeu_ps(out, _mm256_loadu_ps(from + s));
#endif
      for (; s + kStrip<C> <= rows; s += kStrip<C>, out += stride)
        for (int r = 0; r < kStrip<C>; ++r) out[r] = widened<C>(from[s + r]);
    }
    for (; s < rows; s += kStrip<C>, out += stride)
      for (int64_t r = 0; r < std::min<int64_t>(kStrip<C>, rows - s); ++r) out[r] = widened<C>(*element<S>(a, m + s + r, k + i));
  }
}

/// to[row][depth] = a[m .. m + rows][k ..], whose rows are dense: another type is all they need.
template <class S, class C>
void widen_rows(const MatrixOperand& a, int64_t m, int64_t rows, int64_t k, int64_t depth, C* to) {
  for (int64_t i = 0; i < rows; ++i, to += depth) {
    const S* from = element<S>(a, m + i, k);
    for_lanes(depth, [&](int64_t j, auto n) { store_lanes(to + j, load_lanes(from + j, n), n); });
  }
}

template <class C>
bool packs_a(const GemmPart& p) {
  return p.a.dtype != dtype_of<C> || (p.a.col_stride != 1 && p.depth > 1);
}

/// Whether blocks of b are narrow. An a that has to be packed is packed again for every block of b.
template <class C>
bool narrow_blocks(const GemmPart& p) {
  const int64_t most = p.b.col_stride == 1 ? kNarrowMostRowsByRows : kNarrowMostRows;
  const int64_t least = p.b.col_stride == 1 ? kNarrowLeastRows : kStrip<C> + 1;
  return p.rows >= least && p.rows <= most && !packs_a<C>(p);
}

/// The scratch memory of a part, in elements.
template <class C>
struct Blocks {
  int64_t depth, rows, cols;
  explicit Blocks(const GemmPart& p)
      : depth(std::min(kDepthBlock, round_up(p.depth, kLanes))),
        rows(packs_a<C>(p) ? std::min(kRowBlock, round_up(p.rows, kStrip<C>)) : 0) {
    // Blocks of equal width. For a few strips, which are limited by reading b, one panel: it is reread from a near cache.
    const int64_t most = !narrow_blocks<C>(p)  ? col_block()
                         : p.b.col_stride == 1 ? kNarrowBlockByRows
                                               : kNarrowBlock;
    const int64_t panel = kPanel<C> * kLanes, count = (p.cols + most - 1) / most;
    const bool one_panel = p.b.col_stride != 1 && (p.rows <= kStrip<C> || (narrow_blocks<C>(p) && p.rows < kNarrowLeastRows));
    cols = one_panel ? panel : round_up((p.cols + count - 1) / count, panel);
  }
  int64_t a_size() const { return rows / kStrip<C> * strip_stride<C>(depth); }
  int64_t b_size() const { return depth * cols; }
};

/// Prefetches the block of b after (k, n), if blocks are narrow, while that is multiplied.
template <class C, class S>
Fetch fetch_next(const GemmPart& p, int64_t block_cols, int64_t k, int64_t n) {
  const int64_t depth = std::min(kDepthBlock, p.depth - k), cols = std::min(block_cols, p.cols - n);
  const bool deeper = k + depth < p.depth;
  const int64_t next_k = deeper ? k + depth : 0, next_n = deeper ? n : n + cols;
  if (!narrow_blocks<C>(p) || next_n == p.cols || (p.b.row_stride != 1 && p.b.col_stride != 1))
    return {};
  const int64_t next_depth = std::min(kDepthBlock, p.depth - next_k),
                next_cols = std::min(block_cols, p.cols - next_n);
  constexpr int64_t kWidth = kPanel<C> * kLanes, kSize = sizeof(S);
  const int64_t tiles = (p.rows + kStrip<C> - 1) / kStrip<C> * ((cols + kWidth - 1) / kWidth);
  const bool by_rows = p.b.col_stride == 1;
  return {element<S>(p.b, next_k, next_n), (by_rows ? p.b.row_stride : p.b.col_stride) * kSize,
          by_rows ? next_depth : next_cols, (by_rows ? next_cols : next_depth) * kSize,
          tiles * (depth / kTogether)};
}

template <class C, class S>
void multiply(const GemmPart& p, void* scratch) {
  constexpr int64_t kWidth = kPanel<C> * kLanes;
  static_assert(kRowBlock % kStrip<C> == 0);
  const Blocks<C> blocks(p);
  C* packed_b = static_cast<C*>(scratch);
  C* bias = packed_b + blocks.b_size();
  C* packed_a = packs_a<C>(p) ? bias + blocks.cols : nullptr;
  const bool strips = packed_a && p.a.col_stride != 1;
  for (int64_t n0 = 0; n0 < p.cols; n0 += blocks.cols) {
    const int64_t n1 = std::min(n0 + blocks.cols, p.cols);
    if (p.bias.data)
      visit_floating("gemm", p.bias.dtype, [&]<class T>() {
        for (int64_t n = n0; n < n1; ++n)
          bias[n - n0] = widened<C>(*element<T>(p.bias, 0, n));
      });
    for (int64_t k = 0; k < p.depth; k += kDepthBlock) {
      const int64_t depth = std::min(kDepthBlock, p.depth - k);
      const bool deeper = k + depth < p.depth, fetches = p.rows <= kStrip<C> && (deeper || n1 < p.cols);
      const S* next = fetches ? element<S>(p.b, deeper ? k + depth : 0, deeper ? n0 : n1) : nullptr;
      pack_panels(p.b, k, depth, n0, n1 - n0, packed_b, next);
      Fetch fetch = fetch_next<C, S>(p, blocks.cols, k, n0);
      for (int64_t m0 = 0; m0 < p.rows; m0 += kRowBlock) {
        const int64_t m1 = std::min(m0 + kRowBlock, p.rows);
        if (packed_a) (strips ? pack_strips<S, C> : widen_rows<S, C>)(p.a, m0, m1 - m0, k, depth, packed_a);
        for (int64_t m = m0; m < m1; m += kStrip<C>) {
          const int64_t rows = std::min<int64_t>(kStrip<C>, m1 - m);
          const C* a = strips     ? packed_a + (m - m0) / kStrip<C> * strip_stride<C>(depth)
                       : packed_a ? packed_a + (m - m0) * depth
                                  : reinterpret_cast<const C*>(element<S>(p.a, m, k));
          for (int64_t n = n0; n < n1; n += kWidth) {
            const int64_t width = std::min(kWidth, n1 - n), vectors = (width + kLanes - 1) / kLanes;
            const C* panel = packed_b + (n - n0) * round_up(depth, kLanes);
            C* c = reinterpret_cast<C*>(p.c.data) + m * p.c.row_stride + n;
            const bool to_c = k > 0 || p.accumulate || !p.bias.data;
            const Output<C> out{c, p.c.row_stride, k > 0 || p.accumulate || p.bias.data, to_c ? c : bias + (n - n0),
                                to_c ? p.c.row_stride : 0};
            tile_for<C>(strips, rows, vectors)(
                depth, a, packed_a ? depth : p.a.row_stride, panel, out,
                static_cast<int>(width - (vectors - 1) * kLanes), fetch);
          }
        }
      }
    }
  }
}

template <class C>
size_t scratch_bytes(const GemmPart& p) {
  const Blocks<C> blocks(p);
  return static_cast<size_t>(blocks.b_size() + blocks.cols + blocks.a_size()) * sizeof(C);
}

}  // namespace

size_t gemm_scratch(const GemmPart& p) {
  return p.c.dtype == kF64 ? scratch_bytes<double>(p) : scratch_bytes<float>(p);
}

void gemm_part(const GemmPart& p, void* scratch) {
  visit_floating("gemm", p.a.dtype, [&]<class S>() { multiply<ComputeType<S>, S>(p, scratch); });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
