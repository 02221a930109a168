// Tiles of attention's products in shared memory, of f32 or f64, for a block of 256 threads.
//
// A tile holds kTile rows of up to kWidth elements. Thread (ty, tx) of 16 x 16 owns rows ty, ty + 16,
// ... of a product, and of its columns either tx, tx + 16, ... (scores) or 16 bytes at tx, tx + 16, ...
// (results): neighbours read neighbouring 16 bytes, or the same.
#pragma once

#include "sheaf/kernels/cuda/attention_rows.h"
#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda::attention_tiles {

inline constexpr int kThreads = 256;

template <class C_, int kWidth_, int kTile_>
struct Tiles {
  using C = C_;
  static constexpr int kWidth = kWidth_, kTile = kTile_;
  static constexpr int kVec = Pack<C>::kSize;
  static constexpr int kPer = kTile / kSide;               // rows, and scores of a row, per thread
  static constexpr int kChunks = kWidth / (kSide * kVec);  // 16-byte pieces of a result's row per thread
  static constexpr int kStride = kWidth + kVec;            // the rows of a warp fall into all banks
  static constexpr int kScoreStride = kTile + kVec;
  static constexpr size_t kBytes = size_t{kTile} * kStride * sizeof(C);
  static constexpr size_t kScoreBytes = size_t{kTile} * kScoreStride * sizeof(C);
  using Scores = C[kPer][kPer];
  using Results = C[kPer][kChunks][kVec];
};

__device__ inline int tx() { return static_cast<int>(threadIdx.x) % kSide; }
__device__ inline int ty() { return static_cast<int>(threadIdx.x) / kSide; }

/// Rows [first, first + kTile) of a head's `count`; zeros past the last, and past the width up to the next multiple
/// of kVec.
template <class S>
__device__ void load_tile(const Heads& from, int64_t b, int64_t h, int64_t first, int64_t count,
                          typename S::C* tile) {
  using C = typename S::C;
  const C* rows = static_cast<const C*>(from.data) + from.offset(b, first, h);
  const int chunks = static_cast<int>(blocks_for(from.width, S::kVec));
  for (int n = threadIdx.x; n < S::kTile * chunks; n += kThreads) {
    const int row = n / chunks, at = (n - row * chunks) * S::kVec;
    Pack<C> pack{};
    if (row < count - first) pack = load_chunk(rows + row * from.time, at, from.width);
    store_pack(tile + row * S::kStride + at, pack);
  }
}

/// out[i][j] = row ty + 16 i of a times row tx + 16 j of b.
template <class S>
__device__ void multiply_rows(const typename S::C* a, const typename S::C* b, int width,
                              typename S::Scores& out) {
  using C = typename S::C;
#pragma unroll
  for (int i = 0; i < S::kPer; ++i)
#pragma unroll
    for (int j = 0; j < S::kPer; ++j) out[i][j] = C(0);
  for (int d = 0; d < width; d += S::kVec) {
    Pack<C> x[S::kPer], y[S::kPer];
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      x[i] = load_pack(a + (ty() + kSide * i) * S::kStride + d);
      y[i] = load_pack(b + (tx() + kSide * i) * S::kStride + d);
    }
#pragma unroll
    for (int k = 0; k < S::kVec; ++k)
#pragma unroll
      for (int i = 0; i < S::kPer; ++i)
#pragma unroll
        for (int j = 0; j < S::kPer; ++j) out[i][j] = fused_sum(x[i].v[k], y[j].v[k], out[i][j]);
  }
}

/// Stores this thread's scores for accumulate_rows.
template <class S>
__device__ void store_scores(const typename S::Scores& scores, typename S::C* to) {
#pragma unroll
  for (int i = 0; i < S::kPer; ++i)
#pragma unroll
    for (int j = 0; j < S::kPer; ++j)
      to[(ty() + kSide * i) * S::kScoreStride + tx() + kSide * j] = scores[i][j];
}

/// The first column of results in this thread's c-th 16 bytes.
template <class S>
__device__ inline int column(int c) {
  return (tx() + kSide * c) * S::kVec;
}

/// out += scores times the rows of a tile.
template <class S>
__device__ void accumulate_rows(const typename S::C* scores, const typename S::C* tile, int width,
                                typename S::Results& out) {
  using C = typename S::C;
#pragma unroll 1
  for (int r = 0; r < S::kTile; r += S::kVec) {
    Pack<C> w[S::kPer];
#pragma unroll
    for (int i = 0; i < S::kPer; ++i)
      w[i] = load_pack(scores + (ty() + kSide * i) * S::kScoreStride + r);
#pragma unroll
    for (int m = 0; m < S::kVec; ++m)
#pragma unroll
      for (int c = 0; c < S::kChunks; ++c) {
        if (column<S>(c) >= width) continue;
        const Pack<C> v = load_pack(tile + (r + m) * S::kStride + column<S>(c));
#pragma unroll
        for (int i = 0; i < S::kPer; ++i)
#pragma unroll
          for (int k = 0; k < S::kVec; ++k)
            out[i][c][k] = fused_sum(w[i].v[m], v.v[k], out[i][c][k]);
      }
  }
}

/// Stores row i of the results, times `scale`, to row `t` of a head.
template <class S>
__device__ void store_row(const typename S::Results& results, int i, typename S::C scale,
                          const Heads& to, int64_t b, int64_t t, int64_t h) {
  auto* row = static_cast<typename S::C*>(to.data) + to.offset(b, t, h) + column<S>(0);
  const int width = to.width - column<S>(0);
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c)
#pragma unroll
    for (int k = 0; k < S::kVec; ++k) {
      const int n = kSide * S::kVec * c + k;
      if (n < width) row[n] = results[i][c][k] * scale;
    }
}

/// Calls f.operator()<S, V>() with the tiles for queries and keys, and those for values and outputs,
/// which have as many rows and are at most as wide.
template <class F>
void visit_tiles(const char* who, const View& q, const View& v, F&& f) {
  if (q.dtype == kF64) {
    check_widths(who, q, v);
    return f.template operator()<Tiles<double, 256, 32>, Tiles<double, 256, 32>>();
  }
  visit_widths(who, q, v, [&]<int kWidth, int kValueWidth>() {
    f.template operator()<Tiles<float, kWidth, 64>, Tiles<float, kValueWidth, 64>>();
  });
}

}  // namespace sheaf::kernels::cuda::attention_tiles
