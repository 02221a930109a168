#include "sheaf/kernels/cuda/expert_products.h"

#include "sheaf/kernels/cuda/part_rows.h"
#include "sheaf/kernels/cuda/tile_product.h"

namespace sheaf::kernels::cuda {
namespace {

using namespace part_products;

/// A warp processes a group of a part, and sums its experts' counts, 32 at a time. Rows beyond those of the part do not count.
__global__ void find_begins(PartRows r) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (item >= r.parts.parts * r.groups) return;
  const int64_t group = item % r.groups, end = r.parts.first_of(item / r.groups + 1);
  int64_t before = 0;
  for (int64_t first = r.parts.first_of(item / r.groups); first < end; first += kWarp) {
    const int64_t expert = first + lane_of_thread(), at = expert * r.groups + group;
    const int64_t given = expert < end ? *r.given[at] : 0, count = given < 0 ? 0 : given < r.room ? given : r.room;
    const int64_t up_to = before + scan_warp(count, lane_of_thread()), begin = up_to - count < r.room ? up_to - count : r.room;
    if (expert < end) {
      r.begins[at] = static_cast<int32_t>(begin);
      r.counts[at] = static_cast<int32_t>((up_to < r.room ? up_to : r.room) - begin);
    }
    before = __shfl_sync(kFullWarp, up_to, kWarp - 1);
  }
}

/// One block lists the tiles, in the order of experts.
__global__ void __launch_bounds__(kThreads) list_tiles(PartRows r, int tile_rows, RowTiles tiles) {
  __shared__ int64_t of_warps[kWarps];
  int64_t before = 0;  // tiles of earlier experts
  for (int64_t first = 0; first < r.parts.experts; first += kThreads) {
    const int64_t expert = first + threadIdx.x;
    int64_t rows = 0;
    for (int64_t j = 0; expert < r.parts.experts && j < r.groups; ++j) rows += r.count(expert, j);
    const int64_t own = blocks_for(rows, tile_rows), up_to = scan_warp(own, lane_of_thread());
    if (lane_of_thread() == kWarp - 1) of_warps[threadIdx.x / kWarp] = up_to;
    __syncthreads();
    int64_t at = before + up_to - own;
    for (int w = 0; w < kWarps; ++w) {
      if (w < static_cast<int>(threadIdx.x) / kWarp) at += of_warps[w];
      before += of_warps[w];
    }
    __syncthreads();
    for (int64_t t = 0; t < own; ++t) {
      tiles.experts[at + t] = static_cast<int32_t>(expert);
      tiles.firsts[at + t] = static_cast<int32_t>(t * tile_rows);
    }
  }
  for (int64_t t = before + threadIdx.x; t < tiles.count; t += kThreads) tiles.experts[t] = -1;
}

template <class T>
struct LinearProduct {
  PartRows rows;
  RowTiles tiles;
  const T *x, *weight, *bias;
  T* y;
  int64_t in, out, column_tiles;
  int64_t of_expert, of_out, of_in;  ///< strides of the weight
  int64_t bias_pitch;
};

/// Shared memory of a product's pieces, and a thread's share of copying each.
template <class T, bool kWeightInner>
struct LinearPieces {
  using S = Tiling<T>;
  static constexpr int kWeightLines = kWeightInner ? S::kInner : S::kColumns, kWeightLength = kWeightInner ? S::kColumns : S::kInner;
  using OfA = Share<T, S::kRows, S::kInner>;
  using OfB = Share<T, kWeightLines, kWeightLength>;
  Piece<T, S::kRows, S::kInner> a[kRounds];
  Piece<T, kWeightLines, kWeightLength> b[kRounds];
  int64_t row[S::kRows];  // of x and y; -1: none
};

// kWeightInner: the weight is dense along O, as for gradients of x; else along I.
template <class T, bool kPacked, bool kWeightInner>
__global__ void __launch_bounds__(kThreads, 2) multiply_parts(LinearProduct<T> p) {
  using S = Tiling<T>;
  using C = Compute<T>;
  using Pieces = LinearPieces<T, kWeightInner>;
  using OfA = typename Pieces::OfA;
  using OfB = typename Pieces::OfB;
  auto& s = *dynamic_shared<Pieces>();
  const int64_t tile = blockIdx.x / p.column_tiles, first_column = blockIdx.x % p.column_tiles * S::kColumns;
  const int64_t expert = p.tiles.experts[tile];
  if (expert < 0) return;
  for (int r = threadIdx.x; r < S::kRows; r += kThreads) {
    RowCursor at(p.rows, expert);
    at.advance(p.rows, expert, p.tiles.firsts[tile] + r);
    s.row[r] = at.row(p.rows, expert);
  }
  __syncthreads();
  // The first elements of the lines of this thread's packs; nullptr: none.
  const T *a_lines[OfA::kEach], *b_lines[OfB::kEach];
#pragma unroll
  for (int n = 0; n < OfA::kEach; ++n) {
    const int64_t row = s.row[OfA::line(n)];
    a_lines[n] = row < 0 ? nullptr : p.x + row * p.in + OfA::element();
  }
  const int64_t b_column = first_column + (kWeightInner ? OfB::element() : OfB::line(0)), b_inner = kWeightInner ? OfB::line(0) : OfB::element();
#pragma unroll
  for (int n = 0; n < OfB::kEach; ++n) {
    const int64_t column = b_column + (kWeightInner ? 0 : n * OfB::kApart), k = b_inner + (kWeightInner ? n * OfB::kApart : 0);
    b_lines[n] = column < p.out ? p.weight + expert * p.of_expert + column * p.of_out + k * p.of_in : nullptr;
  }
  Sums<T> sums;
  multiply_rounds<T, false, kWeightInner>(sums, blocks_for(p.in, S::kInner), s.a, s.b, [&](int64_t round, auto& a, auto& b) {
    const int64_t first = round * S::kInner, of_weight = first * p.of_in, a_left = p.in - first - OfA::element(), b_left = p.in - first - b_inner;
#pragma unroll
    for (int n = 0; n < OfA::kEach; ++n)
      copy_pack<T, kPacked>(&a.v[OfA::line(n)][OfA::element()], a_lines[n] + first, a_lines[n] ? a_left : 0, 1);
#pragma unroll
    for (int n = 0; n < OfB::kEach; ++n) {
      const int64_t left = kWeightInner ? (b_left > n * OfB::kApart ? p.out - b_column : 0) : b_left;
      copy_pack<T, kPacked>(&b.v[OfB::line(n)][OfB::element()], b_lines[n] + of_weight, b_lines[n] ? left : 0, kWeightInner ? p.of_out : p.of_in);
    }
  });
  sums.each([&](int r, int c, C sum) {
    const int64_t row = s.row[r], column = first_column + c;
    if (row < 0 || column >= p.out) return;
    const C added = p.bias ? convert_to<C>(p.bias[expert * p.bias_pitch + column]) : C(0);
    p.y[row * p.out + column] = element<T>(sum + added);
  });
}

template <class T, class D>
struct GradientProduct {
  PartRows rows;
  const T *dy, *x;
  D* dweight;
  int64_t in, out, column_tiles;
  int64_t of_expert, of_out, of_in;  ///< strides of dweight
};

template <class T>
struct GradientPieces {
  using S = Tiling<T>;
  using OfA = Share<T, S::kInner, S::kRows>;
  using OfB = Share<T, S::kInner, S::kColumns>;
  Piece<T, S::kInner, S::kRows> a[kRounds];
  Piece<T, S::kInner, S::kColumns> b[kRounds];
  int64_t row[kRounds][S::kInner];
};

// Sums over the rows of expert blockIdx.y.
template <class T, class D, bool kPacked>
__global__ void __launch_bounds__(kThreads, 2) multiply_rows(GradientProduct<T, D> p) {
  using S = Tiling<T>;
  using OfA = typename GradientPieces<T>::OfA;
  using OfB = typename GradientPieces<T>::OfB;
  auto& s = *dynamic_shared<GradientPieces<T>>();
  const int64_t expert = blockIdx.y, first_row = blockIdx.x / p.column_tiles * S::kRows, first_column = blockIdx.x % p.column_tiles * S::kColumns;
  int64_t count = 0;
  for (int64_t j = 0; j < p.rows.groups; ++j) count += p.rows.count(expert, j);
  RowCursor at(p.rows, expert);  // for the first threads, one for each row of a round
  if (threadIdx.x < S::kInner) at.advance(p.rows, expert, threadIdx.x);
  const int64_t a_column = first_row + OfA::element(), b_column = first_column + OfB::element();
  Sums<T> sums;
  multiply_rounds<T, true, true>(sums, blocks_for(count, S::kInner), s.a, s.b, [&](int64_t round, auto& a, auto& b) {
    int64_t(&row)[S::kInner] = s.row[round % kRounds];
    if (threadIdx.x < S::kInner) {
      row[threadIdx.x] = at.row(p.rows, expert);
      at.advance(p.rows, expert, S::kInner);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OfA::kEach; ++n) {
      const int64_t from = row[OfA::line(n)];
      copy_pack<T, kPacked>(&a.v[OfA::line(n)][OfA::element()], p.dy + from * p.out + a_column, from < 0 ? 0 : p.out - a_column, 1);
    }
#pragma unroll
    for (int n = 0; n < OfB::kEach; ++n) {
      const int64_t from = row[OfB::line(n)];
      copy_pack<T, kPacked>(&b.v[OfB::line(n)][OfB::element()], p.x + from * p.in + b_column, from < 0 ? 0 : p.in - b_column, 1);
    }
  });
  sums.each([&](int r, int c, Compute<T> sum) {
    const int64_t row = first_row + r, column = first_column + c;
    if (row < p.out && column < p.in) p.dweight[expert * p.of_expert + row * p.of_out + column * p.of_in] = element<D>(sum);
  });
}

/// One warp per row of [Q, J, R]; zeros unused rows.
template <class T>
__global__ void clear_rests(PartRows r, T* y, int64_t cols) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= r.parts.parts * r.groups * r.room) return;
  const int64_t last = (r.parts.first_of(row / r.room / r.groups + 1) - 1) * r.groups + row / r.room % r.groups;
  if (row % r.room < r.begins[last] + r.counts[last]) return;
  for (int64_t i = lane_of_thread(); i < cols; i += kWarp) y[row * cols + i] = element<T>(Compute<T>(0));
}

/// One warp per row of an expert; each expert is its own part.
template <class T>
__global__ void add_bias_to_rows(Rows<T> y, Rows<const int32_t> counts, int64_t room, int64_t rows_of_expert, const T* bias, int64_t pitch) {
  using C = Compute<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= y.count || row % room >= *counts[row / room]) return;
  const T* const from = bias + row / rows_of_expert * pitch;
  T* const to = y[row];
  for (int64_t i = lane_of_thread(); i < y.cols; i += kWarp) to[i] = element<T>(convert_to<C>(to[i]) + convert_to<C>(from[i]));
}

/// A block computes 32 columns of the sums of an expert; warp w adds its rows w, w + 8, .. in order; then the warps' sums are added
/// in order.
template <class T, class D>
__global__ void __launch_bounds__(kThreads) sum_rows(PartRows r, const T* dy, int64_t cols, D* dbias) {
  using C = Compute<T>;
  __shared__ C of_warps[kWarps][kWarp];
  const int64_t expert = blockIdx.y, column = static_cast<int64_t>(blockIdx.x) * kWarp + lane_of_thread();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  RowCursor at(r, expert);
  at.advance(r, expert, warp);
  const T* const from = dy + (column < cols ? column : 0);
  C sum = 0;
  constexpr int kAtOnce = 8;  // loads in flight: past the last row, once more of an earlier one, without a branch
  while (at.group < r.groups) {
    int64_t row[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) row[k] = at.row(r, expert), at.advance(r, expert, kWarps);
    T x[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) x[k] = from[(row[k] < 0 ? row[0] : row[k]) * cols];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (row[k] >= 0) sum += convert_to<C>(x[k]);
  }
  of_warps[warp][lane_of_thread()] = sum;
  __syncthreads();
  if (warp > 0 || column >= cols) return;
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += of_warps[w][lane_of_thread()];
  dbias[expert * cols + column] = element<D>(sum);
}

void find_rows(const char* who, const Stream& stream, const PartRows& r) {
  launch(who, stream, {.blocks = blocks_for(r.parts.parts * r.groups, kWarps), .threads = kThreads}, find_begins, r);
}

bool takes_packs(const void* data, int64_t pitch, size_t size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && pitch * static_cast<int64_t>(size) % 16 == 0;
}

}  // namespace

size_t part_linear_workspace(const View& counts, const View& x) {
  return visit_floating("expert_linear", x.dtype, [&]<class T>() {
    const PartRows rows("expert_linear", counts, View::dense(nullptr, x.dtype, x.shape));
    return rows.bytes() + RowTiles::bytes(rows, Tiling<T>::kRows);
  });
}

void part_linear(const Stream& stream, const View& x, const View& weight, const View& bias, const View& counts, const View& y,
                 Workspace workspace) {
  constexpr const char* who = "expert_linear";
  if (y.numel() == 0) return;
  PartRows rows(who, counts, x);
  check<ShapeError>(y.contiguous(), '[', who, "] wants dense results");
  visit_floating(who, x.dtype, [&]<class T>() {
    using S = Tiling<T>;
    Carver carver(who, workspace);
    rows.place(carver);
    const RowTiles tiles(rows, S::kRows, carver);
    find_rows(who, stream, rows);
    launch(who, stream, {.blocks = 1, .threads = kThreads}, list_tiles, rows, S::kRows, tiles);
    const int64_t in = x.shape.back(), out = y.shape.back();
    const LinearProduct<T> p{rows, tiles, x.as<const T>(), weight.as<const T>(), bias.rank() ? bias.as<const T>() : nullptr, y.as<T>(),
                             in, out, blocks_for(out, S::kColumns), weight.strides[0], weight.strides[1], weight.strides[2],
                             bias.rank() ? bias.strides[0] : 0};
    const bool inner = weight.strides[1] == 1 && weight.strides[2] != 1;
    const int64_t pitch = inner ? weight.strides[2] : weight.strides[1], length = inner ? out : in;
    const bool packed = (inner || weight.strides[2] == 1) && takes_packs(x.data, in, sizeof(T)) && takes_packs(weight.data, pitch, sizeof(T)) &&
                        takes_packs(nullptr, weight.strides[0], sizeof(T)) && takes_packs(nullptr, length, sizeof(T));
    const auto run = [&](auto kernel, size_t shared) {
      launch(who, stream, {.blocks = p.column_tiles * tiles.count, .threads = kThreads, .shared_bytes = shared}, kernel, p);
    };
    if (inner) run(packed ? multiply_parts<T, true, true> : multiply_parts<T, false, true>, sizeof(LinearPieces<T, true>));
    else run(packed ? multiply_parts<T, true, false> : multiply_parts<T, false, false>, sizeof(LinearPieces<T, false>));
    launch(who, stream, {.blocks = blocks_for(rows.parts.parts * rows.groups * rows.room, kWarps), .threads = kThreads}, clear_rests<T>, rows,
           y.as<T>(), out);
  });
}

size_t part_weight_gradient_workspace(const View& counts, const View& x) {
  return PartRows("expert_weight_gradient", counts, View::dense(nullptr, x.dtype, x.shape)).bytes();
}

void part_weight_gradient(const Stream& stream, const View& dy, const View& x, const View& counts, const View& dweight,
                          Workspace workspace) {
  constexpr const char* who = "expert_weight_gradient";
  if (dweight.numel() == 0) return;
  PartRows rows(who, counts, x);
  check<ShapeError>(dy.contiguous(), '[', who, "] wants dense rows");
  Carver carver(who, workspace);
  rows.place(carver);
  find_rows(who, stream, rows);
  visit_floating(who, x.dtype, [&]<class T>() {
    using S = Tiling<T>;
    const int64_t in = x.shape.back(), out = dy.shape.back();
    const bool packed = takes_packs(x.data, in, sizeof(T)) && takes_packs(dy.data, out, sizeof(T));
    const auto run = [&]<class D>() {
      const GradientProduct<T, D> p{rows, dy.as<const T>(), x.as<const T>(), dweight.as<D>(), in, out, blocks_for(in, S::kColumns),
                                    dweight.strides[0], dweight.strides[1], dweight.strides[2]};
      launch(who, stream,
             {.blocks = p.column_tiles * blocks_for(out, S::kRows), .threads = kThreads, .blocks_y = rows.parts.experts,
              .shared_bytes = sizeof(GradientPieces<T>)},
             packed ? multiply_rows<T, D, true> : multiply_rows<T, D, false>, p);
    };
    if (dweight.dtype == x.dtype) run.template operator()<T>();
    else run.template operator()<Compute<T>>();
  });
}

size_t part_bias_gradient_workspace(const View& counts, const View& dy) { return part_weight_gradient_workspace(counts, dy); }

void part_bias_gradient(const Stream& stream, const View& dy, const View& counts, const View& dbias, Workspace workspace) {
  constexpr const char* who = "expert_bias_gradient";
  if (dbias.numel() == 0) return;
  PartRows rows(who, counts, dy);
  const int64_t cols = dy.shape.back();
  check<ShapeError>(dbias.shape == Shape{rows.parts.experts, cols} && dbias.contiguous(), '[', who, "] gradients ", dbias.shape, " of rows ",
                    dy.shape);
  Carver carver(who, workspace);
  rows.place(carver);
  find_rows(who, stream, rows);
  visit_floating(who, dy.dtype, [&]<class T>() {
    const auto run = [&]<class D>() {
      launch(who, stream, {.blocks = blocks_for(cols, kWarp), .threads = kThreads, .blocks_y = rows.parts.experts}, sum_rows<T, D>, rows,
             dy.as<const T>(), cols, dbias.as<D>());
    };
    if (dbias.dtype == dy.dtype) run.template operator()<T>();
    else run.template operator()<Compute<T>>();
  });
}

void add_expert_bias(const Stream& stream, const View& bias, const View& counts, const View& y) {
  constexpr const char* who = "expert_linear";
  if (y.numel() == 0) return;
  visit_floating(who, y.dtype, [&]<class T>() {
    const auto rows = rows_of<T>(who, y);
    launch(who, stream, {.blocks = blocks_for(rows.count, kWarps), .threads = kThreads}, add_bias_to_rows<T>, rows,
           elements_of<const int32_t>(who, counts), y.shape.dim(-2), rows.count / y.shape[0], bias.as<const T>(), bias.strides[0]);
  });
}

}  // namespace sheaf::kernels::cuda
