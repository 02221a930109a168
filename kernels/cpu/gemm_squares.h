// The product of bf16 matrices in squares of 32 x 32, by any Engine with
//   Scope           per-thread setup for its products
//   kBlockSteps, kRoom, kSquares   how much is packed at once, by its machines' caches, see Cut
//   multiply(steps, rows, a, b, from, to, between)   to = from (zero if nullptr) + a b, a square; a of Rows, b packed
//       over some steps of the depth, with one call of between() for each step, the first before
//       anything is stored; only the first `rows` rows count, the others may have any values
//
// [Note: products by squares] Each square is computed over a block of the depth small enough that both its sides fit in L1. One
// operand is "resident": a packed block of it stays in L2. The other, the "stream", arrives in panels of some sides over a block of
// the depth; a panel multiplies all of the resident block. Meanwhile the next panel is packed and the one after it prefetched, a
// little at every step: tile instructions leave much of the core idle. Packing there still takes longer than packing alone, so rows of
// a that lie well are read where they are.
//
// Panels have four sides, because memory is fast only where 256 or more bytes are contiguous; in dense rows of a they are.
//
// An engine adds its products to c one after another. A square that was stored to memory and reloaded continues unchanged, so an
// element is one chain along the depth however the blocks are cut: blocks depend only on the caches.
#pragma once

#include <algorithm>
#include <utility>

#include "sheaf/kernels/cpu/gemm_pack.h"
#include "sheaf/kernels/cpu/gemm_part.h"

namespace sheaf::kernels::cpu::squares {

/// 32 rows of a, over steps of 64 bytes. Strides in bytes.
struct Rows {
  const char* data;
  int64_t stride, step;
};

inline constexpr int64_t kSquareBytes = kSide * kSide * 4;
constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

/// How a part is cut; extents in sides (of lanes) and in steps (of the depth).
template <class Engine>
struct Cut {
  bool a_streams;
  int64_t panel_sides;
  Sides resident, stream;
  int64_t steps, resident_sides, stream_sides;  ///< of the whole
  int64_t block_steps, chunk_steps;             ///< summed in tiles; resident at once
  int64_t block_sides, group_sides;             ///< of resident and stream: squares in progress at once
  bool in_place;                                ///< the stream, rows of a, is not packed

  explicit Cut(const GemmPart& p) {
    const auto words = [](const MatrixOperand& m) { return reinterpret_cast<const uint16_t*>(m.data); };
    const Sides a{words(p.a), p.rows, p.depth, p.a.row_stride, p.a.col_stride, false};
    const Sides b{words(p.b), p.cols, p.depth, p.b.col_stride, p.b.row_stride, true};
    // An a that must be transposed is the most work to pack, so that is done in between. Otherwise by measurement:
    // many rows stream, because then c is written along its rows; few rows are resident, because b is then all of
    // the traffic.
    a_streams = (a.depth_stride != 1 && a.depth > 1) || p.rows > 512;
    panel_sides = a_streams && a.depth_stride == 1 ? 1 : 4;
    resident = a_streams ? b : a, stream = a_streams ? a : b;
    steps = ceil_div(p.depth, kSide);
    resident_sides = ceil_div(resident.lanes, kSide), stream_sides = ceil_div(stream.lanes, kSide);

    // In the second-level cache: kRoom steps of sides, or fewer together with kSquares squares.
    constexpr int64_t kRoom = Engine::kRoom, kMost = 24, kLeast = 8, kDeepRoom = kRoom * 3 / 4, kSquares = kRoom / 2;
    block_steps = ceil_div(steps, ceil_div(steps, Engine::kBlockSteps));
    chunk_steps = steps, group_sides = panel_sides;
    block_sides = std::min({resident_sides, kMost, kRoom / steps});
    if (block_sides < std::min(resident_sides, kLeast)) {  // too deep: squares wait while the depth is processed in chunks
      block_sides = resident_sides <= kLeast * 3 / 2 ? resident_sides : kLeast;
      chunk_steps = kDeepRoom / block_sides / block_steps * block_steps;
      group_sides = kSquares / block_sides / panel_sides * panel_sides;
    }
    block_sides = ceil_div(resident_sides, ceil_div(resident_sides, block_sides));
    group_sides = std::min(group_sides, stream_sides);

    // Whole squares, in whole cache lines; but rows 2 KiB apart share sets of the first-level cache, which cannot hold 32 of them.
    const int64_t stride = a.lane_stride * 2;
    in_place = a_streams && a.depth_stride == 1 && p.rows % kSide == 0 && p.depth % kSide == 0 && stride % 64 == 0 && stride % 2048 != 0 &&
               reinterpret_cast<uintptr_t>(a.data) % 64 == 0;
  }
  int64_t resident_bytes() const { return block_sides * std::min(chunk_steps, steps) * kStepBytes; }
  int64_t panel_bytes() const { return std::min(panel_sides, stream_sides) * block_steps * kStepBytes; }
  int64_t squares_bytes() const { return block_sides * group_sides * kSquareBytes; }
};

/// A panel of the stream over a block of the depth, and its range of the resident operand. In sides and steps.
template <class Cut>
struct Stage {
  int64_t resident = 0, group = 0, chunk = 0, panel = 0, depth = 0;

  int64_t chunk_end(const Cut& cut) const { return std::min(chunk + cut.chunk_steps, cut.steps); }
  int64_t group_end(const Cut& cut) const { return std::min(group + cut.group_sides, cut.stream_sides); }
  int64_t steps(const Cut& cut) const { return std::min(cut.block_steps, chunk_end(cut) - depth); }
  int64_t sides(const Cut& cut) const { return std::min(cut.panel_sides, group_end(cut) - panel); }
  int64_t resident_sides(const Cut& cut) const { return std::min(cut.block_sides, cut.resident_sides - resident); }

  bool advance(const Cut& cut) {
    if (depth += cut.block_steps; depth < chunk_end(cut)) return true;
    depth = chunk;
    if (panel += cut.panel_sides; panel < group_end(cut)) return true;
    panel = group, depth = chunk += cut.chunk_steps;
    if (chunk < cut.steps) return true;
    depth = chunk = 0, panel = group += cut.group_sides;
    if (group < cut.stream_sides) return true;
    panel = group = 0, resident += cut.block_sides;
    return resident < cut.resident_sides;
  }
};

/// The work done between products for the coming panels.
template <class Cut>
class Errands {
 public:
  explicit Errands(const Cut& cut) : cut_(cut) {}

  /// Packs the panel of `next` into `to`, and prefetches that of `after`, in `times` calls of some().
  void set(const Stage<Cut>* next, const Stage<Cut>* after, char* to, int64_t times) {
    times_ = times, to_ = to;
    pack_ = {}, fetch_ = {};
    if (next) pack_ = {next, next->steps(cut_), next->sides(cut_) * next->steps(cut_)};
    if (after) {
      const bool along_depth = cut_.stream.depth_stride == 1;
      const int64_t lanes = after->sides(cut_) * kSide, deep = after->steps(cut_) * kSide;
      const int64_t lane = after->panel * kSide, depth = after->depth * kSide;
      const Sides& s = cut_.stream;
      fetch_from_ = s.data + lane * s.lane_stride + depth * s.depth_stride;
      fetch_stride_ = along_depth ? s.lane_stride : s.depth_stride;
      fetch_rows_ = along_depth ? std::min(lanes, s.lanes - lane) : std::min(deep, s.depth - depth);
      fetch_lines_ = ((along_depth ? std::min(deep, s.depth - depth) : std::min(lanes, s.lanes - lane)) + 31) / 32;
      fetch_.left = fetch_rows_ * fetch_lines_;
      fetch_row_ = fetch_line_ = 0;
    }
    pack_.credit = fetch_.credit = 0, pack_.total = pack_.left, fetch_.total = fetch_.left;
  }
  void some() {
    for (pack_.credit += pack_.total; pack_.credit >= times_; pack_.credit -= times_) pack();
    for (fetch_.credit += fetch_.total; fetch_.credit >= times_; fetch_.credit -= times_) fetch();
  }
  void all() {
    while (pack_.left > 0) pack();
  }

 private:
  struct Job {
    const Stage<Cut>* stage = nullptr;
    int64_t steps = 0, left = 0, total = 0, credit = 0;
  };

  void pack() {
    // Side after side within a step, so that memory is read along its rows.
    const int64_t sides = pack_.total / pack_.steps, done = pack_.total - pack_.left--;
    const int64_t side = done % sides, step = done / sides;
    pack_step(cut_.stream, (pack_.stage->panel + side) * kSide, (pack_.stage->depth + step) * kSide,
              to_ + (side * pack_.steps + step) * kStepBytes);
  }
  void fetch() {
    const uint16_t* at = fetch_from_ + fetch_row_ * fetch_stride_ + fetch_line_ * 32;
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    if (++fetch_line_ == fetch_lines_) fetch_line_ = 0, ++fetch_row_;
  }

  const Cut& cut_;
  Job pack_, fetch_;
  char* to_ = nullptr;
  int64_t times_ = 1;
  const uint16_t* fetch_from_ = nullptr;
  int64_t fetch_stride_ = 0, fetch_rows_ = 0, fetch_lines_ = 0, fetch_row_ = 0, fetch_line_ = 0;
};

/// Where a square of c is stored.
struct Square {
  char* data;
  int64_t stride;  ///< bytes
};

template <class Engine>
class Part {
  using Cut = squares::Cut<Engine>;
  using Stage = squares::Stage<Cut>;

 public:
  Part(const GemmPart& part, void* scratch) : p_(part), cut_(part), errands_(cut_) {
    char* at = static_cast<char*>(scratch);
    resident_ = at, at += cut_.resident_bytes();
    panel_ = at, at += cut_.panel_bytes();
    next_panel_ = at, at += cut_.panel_bytes();
    squares_ = at;
  }

  void run() {
    Stage now, next, after;
    int64_t resident = -1, chunk = -1;
    if (!cut_.in_place) errands_.set(&now, nullptr, next_panel_, 1);
    bool more = true, fetches = after.advance(cut_);
    while (more) {
      errands_.all();
      std::swap(panel_, next_panel_);
      if (now.resident != resident || now.chunk != chunk)
        pack_resident(now), resident = now.resident, chunk = now.chunk;
      next = now, more = next.advance(cut_);
      fetches = more && after.advance(cut_);
      const bool is_near = cut_.in_place && after.resident > 0;  // it was read for the block before
      errands_.set(more && !cut_.in_place ? &next : nullptr, fetches && !is_near ? &after : nullptr, next_panel_,
                   now.sides(cut_) * now.resident_sides(cut_) * now.steps(cut_));
      multiply_panel(now);
      now = next;
    }
    deliver();
  }

 private:
  /// [blocks of the depth][sides][steps of the block]
  void pack_resident(const Stage& t) {
    const int64_t sides = t.resident_sides(cut_);
    char* to = resident_;
    for (int64_t block = t.chunk; block < t.chunk_end(cut_); block += cut_.block_steps) {
      const int64_t steps = std::min(cut_.block_steps, t.chunk_end(cut_) - block);
      const bool along_depth = cut_.resident.depth_stride == 1;
      for (int64_t n = 0; n < sides * steps; ++n) {  // in memory order
        const int64_t side = along_depth ? n / steps : n % sides, step = along_depth ? n % steps : n / sides;
        pack_step(cut_.resident, (t.resident + side) * kSide, (block + step) * kSide,
                  to + (side * steps + step) * kStepBytes);
      }
      to += sides * steps * kStepBytes;
    }
  }

  void multiply_panel(const Stage& t) {
    const int64_t steps = t.steps(cut_), side_bytes = steps * kStepBytes, sides = t.resident_sides(cut_);
    const char* resident = resident_ + sides * (t.depth - t.chunk) * kStepBytes;
    char* square = squares_ + (t.panel - t.group) * cut_.block_sides * kSquareBytes;
    // The columns of c in the inner loop: it is written along its rows.
    const int64_t outer = cut_.a_streams ? t.sides(cut_) : sides, inner = cut_.a_streams ? sides : t.sides(cut_);
    for (int64_t i = 0; i < outer; ++i)
      for (int64_t j = 0; j < inner; ++j, square += kSquareBytes) {
        if (cut_.a_streams)
          multiply_square(t, t.panel + i, t.resident + j, rows_of_stream(t, i), resident + j * side_bytes, square);
        else
          multiply_square(t, t.resident + i, t.panel + j, packed(resident + i * side_bytes), panel_ + j * side_bytes, square);
      }
  }

  static Rows packed(const char* side) { return {side, 64, kStepBytes}; }
  Rows rows_of_stream(const Stage& t, int64_t side) const {
    if (!cut_.in_place) return packed(panel_ + side * t.steps(cut_) * kStepBytes);
    const Sides& s = cut_.stream;
    return {reinterpret_cast<const char*>(s.data + (t.panel + side) * kSide * s.lane_stride + t.depth * kSide), s.lane_stride * 2, 64};
  }

  /// a and b: sides `i` and `j`. `memory` holds the square until the depth is done.
  void multiply_square(const Stage& t, int64_t i, int64_t j, Rows a, const char* b, char* memory) {
    const int64_t row = i * kSide, col = j * kSide;
    const Square here{memory, 128};
    const int64_t steps = t.steps(cut_);
    const bool first = t.depth == 0, last = t.depth + steps == cut_.steps;
    const bool direct = p_.c.dtype == kF32 && row + kSide <= p_.rows && col + kSide <= p_.cols;
    const Square home{p_.c.data + (row * p_.c.row_stride + col) * 4, p_.c.row_stride * 4};
    const Square* from = &here;
    if (first) {
      from = !p_.accumulate ? nullptr : direct ? &home : &here;
      if (from == &here) deliver(), fetch(row, col, here);  // deliver: perhaps from the same place
    }
    const bool finished = last && direct && !p_.bias.data;
    int64_t at = 0;
    const int64_t rows = std::min(kSide, p_.rows - row);
    // Meanwhile the old c of the next square in these rows is read, a few of its rows with each step.
    const int64_t each = (kSide + steps - 1) / steps;
    int64_t ahead = first && direct && p_.accumulate ? 0 : kSide;
    Engine::multiply(steps, rows, a, b, from, finished ? home : here, [&] {
      if (++at == 1) deliver();
      for (const int64_t end = std::min(kSide, ahead + each); ahead < end; ++ahead) {
        const char* next = home.data + ahead * home.stride + 128;
        __builtin_prefetch(next, 1), __builtin_prefetch(next + 64, 1);
      }
      errands_.some();
    });
    if (last && !finished) waiting_ = {here, row, col};
  }

  /// Loads the old c, at the edge.
  void fetch(int64_t row, int64_t col, Square to) const {
    const __mmask32 width = first_of_32(p_.cols - col);
    for (int64_t r = 0; r < std::min(kSide, p_.rows - row); ++r) {
      const float* c = reinterpret_cast<const float*>(p_.c.data) + (row + r) * p_.c.row_stride + col;
      float* t = reinterpret_cast<float*>(to.data + r * to.stride);
      _mm512_store_ps(t, _mm512_maskz_loadu_ps(static_cast<__mmask16>(width), c));
      _mm512_store_ps(t + 16, _mm512_maskz_loadu_ps(static_cast<__mmask16>(width >> 16), c + 16));
    }
  }

  /// Writes the previously finished square to c: one square late, so that nothing waits for a fresh store.
  void deliver() {
    if (!waiting_.from.data) return;
    const auto [from, row, col] = waiting_;
    waiting_.from.data = nullptr;
    const __mmask32 width = first_of_32(p_.cols - col);
    const auto low = static_cast<__mmask16>(width), high = static_cast<__mmask16>(width >> 16);
    __m512 add[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const bool biased = p_.bias.data != nullptr;
    if (biased) load_bias(col, add);
    const int64_t rows = std::min(kSide, p_.rows - row), size = p_.c.dtype == kBF16 ? 2 : 4;
    const int64_t stride = p_.c.row_stride * size;
    char* to = p_.c.data + (row * p_.c.row_stride + col) * size;
    for (int64_t r = 0; r < rows; ++r, to += stride) {
      const float* f = reinterpret_cast<const float*>(from.data + r * from.stride);
      __m512 x = _mm512_load_ps(f), y = _mm512_load_ps(f + 16);
      if (biased) x = _mm512_add_ps(x, add[0]), y = _mm512_add_ps(y, add[1]);
      if (size == 2) {
        _mm512_mask_storeu_epi16(to, width, to_bf16(x, y));
      } else {
        _mm512_mask_storeu_ps(to, low, x);
        _mm512_mask_storeu_ps(to + 64, high, y);
      }
    }
  }

  void load_bias(int64_t col, __m512 to[2]) const {
    alignas(64) float b[kSide] = {};
    for (int64_t j = 0; j < std::min(kSide, p_.cols - col); ++j) {
      const char* at = p_.bias.data + (col + j) * p_.bias.col_stride * static_cast<int64_t>(size_of(p_.bias.dtype));
      b[j] = p_.bias.dtype == kF32 ? *reinterpret_cast<const float*>(at)
                                   : static_cast<float>(*reinterpret_cast<const bf16*>(at));
    }
    to[0] = _mm512_load_ps(b), to[1] = _mm512_load_ps(b + 16);
  }

  struct Waiting {
    Square from{nullptr, 0};
    int64_t row = 0, col = 0;
  };

  const GemmPart& p_;
  const Cut cut_;
  Errands<Cut> errands_;
  char *resident_, *panel_, *next_panel_, *squares_;
  Waiting waiting_;
};

template <class Engine>
size_t scratch_bytes(const GemmPart& p) {
  const Cut<Engine> cut(p);
  return static_cast<size_t>(cut.resident_bytes() + 2 * cut.panel_bytes() + cut.squares_bytes());
}

template <class Engine>
void run(const GemmPart& p, void* scratch) {
  [[maybe_unused]] const typename Engine::Scope scope;
  Part<Engine>(p, scratch).run();
}

}  // namespace sheaf::kernels::cpu::squares
