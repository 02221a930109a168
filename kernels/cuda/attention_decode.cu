#include "sheaf/kernels/cuda/attention_decode.h"

#include <algorithm>
#include <bit>

#include "sheaf/kernels/cuda/attention_segments.h"
#include "sheaf/kernels/cuda/attention_tiles.h"
#include "sheaf/kernels/cuda/workspace.h"

namespace sheaf::kernels::cuda::decode {

using namespace attention_tiles;

namespace {

constexpr int kRows = kSegmentRows;
constexpr int kTile = 64;  // keys, as many as in a tile of attention_blocked.cu with f32
constexpr int kScores = kTile / kSide;
constexpr int kColumns = 4;  // of a result's row, per thread

/// The contents of shared memory: queries, keys and later values, scores and later weights.
template <int kWidth_, int kValueWidth_>
struct Sizes {
  static constexpr int kWidth = kWidth_, kValueWidth = kValueWidth_;
  static constexpr int kVec = Pack<float>::kSize;
  // 16 bytes of padding, so that the rows of a warp cover all banks.
  static constexpr int kStride = kWidth + kVec, kScoreStride = kTile + kVec;
  static constexpr size_t kBytes =
      (size_t{kTile} * kStride + size_t{kRows} * (kStride + kScoreStride + 1)) * sizeof(float);
  static_assert(kValueWidth <= kWidth);
  // Blocks on a multiprocessor, as registers allow: while one waits for memory, others compute.
  static constexpr int kBlocks = kWidth <= 64 ? 3 : kWidth <= 128 ? 2 : 1;
};

/// A thread's part of a tile in flight from global to shared memory: it is requested before the product with the previous tile, and
/// stored after it. Rows that do not consist of whole packs are read element by element when they are stored.
template <class S, int kWidth>
struct Fetched {
  static constexpr int kAcross = std::bit_ceil(unsigned{kWidth / S::kVec}),
                       kStep = kThreads / kAcross, kPer = kTile / kStep;
  Pack<float> packs[kPer];

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * S::kVec; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kAcross; }

  /// Rows [first, first + kTile) of a head that has `count`; zeros past them.
  template <bool kWhole>
  __device__ void fetch(const Heads& from, const float* first, int count) {
    if constexpr (kWhole) {
      const float* at = first + row() * from.time + column();
#pragma unroll
      for (int i = 0; i < kPer; ++i, at += kStep * from.time)
        packs[i] =
            row() + i * kStep < count && column() < from.width ? load_pack(at) : Pack<float>{};
    }
  }
  template <bool kWhole>
  __device__ void place(const Heads& from, const float* first, int count, float* tile) const {
    if (column() >= from.width) return;
    float* to = tile + row() * S::kStride + column();
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) store_pack(to + i * kStep * S::kStride, packs[i]);
    } else {
      for (int i = row(); i < kTile; i += kStep, to += kStep * S::kStride)
        store_pack(to, i < count ? load_chunk(first + i * from.time, column(), from.width)
                                 : Pack<float>{});
    }
  }
};

/// Scores of rows [low, high) with the keys of a tile: a thread has one key and every fourth row.
template <class S>
__device__ void score_rows(const float* queries, const float* tile, int width,
                           int low, int high, float* scores) {
  constexpr int kStep = kThreads / kTile, kPer = kRows / kStep;
  const int key = static_cast<int>(threadIdx.x) % kTile,
            first = low + static_cast<int>(threadIdx.x) / kTile;
  if (first >= high) return;
  float sums[kPer] = {};
  for (int d = 0; d < width; d += S::kVec) {
    const auto pack = load_pack(tile + key * S::kStride + d);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (first + i * kStep >= high) continue;
      const float* row = queries + (first + i * kStep) * S::kStride + d;
      const Pack<float> x = load_pack(row);
#pragma unroll
      for (int m = 0; m < S::kVec; ++m) sums[i] = fused_sum(x.v[m], pack.v[m], sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (first + i * kStep < high) scores[(first + i * kStep) * S::kScoreStride + key] = sums[i];
}

/// Rows [low, high) of the result: a thread has kColumns columns of every kStep-th.
template <class S>
struct Results {
  static constexpr int kAcross = S::kValueWidth / kColumns, kStep = kThreads / kAcross,
                       kPer = kRows / kStep;
  float sums[kPer][kColumns] = {};

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * kColumns; }
  __device__ static int row(int low, int i) {
    return low + static_cast<int>(threadIdx.x) / kAcross + i * kStep;
  }

  /// Adds weights times the values of a tile.
  __device__ void accumulate(const float* weights, const float* shrinks, const float* tile, int width,
                             int low, int high) {
    if (column() >= width || row(low, 0) >= high) return;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        if (row(low, i) < high) sums[i][k] = rounded_product(sums[i][k], shrinks[row(low, i)]);
#pragma unroll 2
    for (int r = 0; r < kTile; r += 4) {
      Pack<float> w[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (row(low, i) < high) w[i] = load_pack(weights + row(low, i) * S::kScoreStride + r);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const Pack<float> v = load_pack(tile + (r + m) * S::kStride + column());
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          if (row(low, i) < high)
#pragma unroll
            for (int k = 0; k < kColumns; ++k)
              sums[i][k] = fused_sum(w[i].v[m], v.v[k], sums[i][k]);
      }
    }
  }
};

template <class S, bool kWhole>
__global__ void __launch_bounds__(kThreads, S::kBlocks)
    attention_of_segments(Problem p, Heads q, Heads k, Heads v, Segments to, Begins begins,
                          int64_t tiles) {
  float* const queries = dynamic_shared<float>();
  float* const weights = queries + kRows * S::kStride;
  float* const shrinks = weights + kRows * S::kScoreStride;
  float* const tile = shrinks + kRows;

  const SegmentBlock block(p, to.slots, tiles);
  constexpr int kQueryChunks = S::kWidth / S::kVec;
  for (int n = threadIdx.x; n < block.rows * kQueryChunks; n += kThreads) {
    const int row = n / kQueryChunks, at = n % kQueryChunks * S::kVec;
    if (at >= q.width) continue;
    const float* from = static_cast<const float*>(q.data) + q.offset(block.b, block.query(row), block.head(row));
    store_pack(queries + row * S::kStride + at, load_chunk(from, at, q.width));
  }

  for_each_part<kTile>(p, begins, block, to.slots, [&](const SegmentPart& part) {
    const int low = part.low, high = part.high, there = part.there;
    const float* at_k = static_cast<const float*>(k.data) + k.offset(block.b, part.first, block.g);
    const float* at_v = static_cast<const float*>(v.data) + v.offset(block.b, part.first, block.g);
    const SeenKeys sees = part.seen_by(p, block, ty());  // the row for which this thread has scores

    Results<S> results;
    Softmax<float> segment;
    Fetched<S, S::kWidth> of_keys;
    Fetched<S, S::kValueWidth> of_values;
    of_keys.template fetch<kWhole>(k, at_k, there);
    __syncthreads();
    of_keys.template place<kWhole>(k, at_k, there, tile);
    for (int key = 0; key < part.count; key += kTile) {
      __syncthreads();
      of_values.template fetch<kWhole>(v, at_v, there - key);
      score_rows<S>(queries, tile, q.width, low, high, weights);
      __syncthreads();
      float scores[kScores];
      float* const row = weights + ty() * S::kScoreStride + tx();
#pragma unroll
      for (int j = 0; j < kScores; ++j)
        scores[j] = sees.has(key + tx() + kSide * j)
                        ? capped<Hides::something>(p, rounded_product(row[kSide * j], static_cast<float>(p.scale)))
                        : kHidden<float>;
      const float shrink = add_tile(segment, scores);
#pragma unroll
      for (int j = 0; j < kScores; ++j) row[kSide * j] = scores[j];
      if (tx() == 0) shrinks[ty()] = shrink;
      of_values.template place<kWhole>(v, at_v, there - key, tile);
      __syncthreads();
      at_k += kTile * k.time, at_v += kTile * v.time;
      const bool more = key + kTile < part.count;
      if (more) of_keys.template fetch<kWhole>(k, at_k, there - key - kTile);
      results.accumulate(weights, shrinks, tile, v.width, low, high);
      __syncthreads();
      if (more) of_keys.template place<kWhole>(k, at_k, there - key - kTile, tile);
    }
    close_segment<kSide>(segment);
    if (ty() >= low && ty() < high && tx() == 0) to.rows[to.slot_of(p, block, ty())] = segment;
    const int column = Results<S>::column();
#pragma unroll
    for (int i = 0; i < Results<S>::kPer; ++i) {
      const int n = Results<S>::row(low, i);
      if (n >= high || column >= v.width) continue;
      Pack<float> pack;
#pragma unroll
      for (int m = 0; m < kColumns; ++m) pack.v[m] = results.sums[i][m];
      store_pack(to.sums + to.slot_of(p, block, n) * to.width + column, pack);
    }
  });
}

constexpr int kCombining = 128;  // threads; each has up to two columns

// A block combines the segments of one query of a head. The weight of each depends only on the largest scores before it, so
// kCombining weights are computed at once; sums are added one by one.
__global__ void __launch_bounds__(kCombining)
    attention_of_rows(Problem p, Segments from, DType dtype, Heads out, PerQuery<float> lse, Begins begins) {
  __shared__ float most[kCombining], total[kCombining];
  __shared__ Shares<float> shares[kCombining];
  const int64_t t = blockIdx.x % p.queries, pair = blockIdx.x / p.queries, b = pair / p.heads,
                h = pair % p.heads;
  const auto [first, behind] = segments_seen(p, document_of(p, begins, b, t), t);
  const int64_t row = from.first_slot(p, b, h, t);
  const int thread = static_cast<int>(threadIdx.x);
  float sums[2] = {};
  Softmax<float> so_far;
  for (int64_t c = first; c < behind; c += kCombining) {
    const int count = static_cast<int>(behind - c < kCombining ? behind - c : kCombining);
    __syncthreads();
    if (thread < count) {
      const Softmax<float> segment = from.rows[row + (c + thread) % from.slots];
      most[thread] = segment.most, total[thread] = segment.total;
    }
    __syncthreads();
    if (thread < count) {
      float before = so_far.most;
      for (int n = 0; n < thread; ++n) before = most[n] > before ? most[n] : before;
      shares[thread] = shares_of(before, most[thread]);
    }
    __syncthreads();
    int slot = static_cast<int>(c % from.slots);
#pragma unroll 16
    for (int n = 0; n < count; ++n) {
      const float* of_segment = from.sums + (row + slot) * from.width;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = thread + i * kCombining;
        if (column < out.width) sums[i] = shares[n].sum(sums[i], of_segment[column]);
      }
      so_far.most = most[n] > so_far.most ? most[n] : so_far.most;
      so_far.total = shares[n].sum(so_far.total, total[n]);
      slot = slot + 1 == from.slots ? 0 : slot + 1;
    }
  }
  const Ending<float> ending = ending_of(so_far);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = thread + i * kCombining;
    if (column < out.width)
      store_any(dtype, out.data, out.offset(b, t, h) + column, sums[i] * ending.scale);
  }
  if (thread == 0) lse.at(b, h, t) = ending.lse;
}

/// Sizes only, without memory.
Segments segments_of(const Problem& p, const View& v) {
  return {nullptr, nullptr, static_cast<int>(slots_of(p)),
          static_cast<int>(blocks_for(v.shape[3], kColumns)) * kColumns};
}
int64_t segments_in_all(const Problem& p, const Segments& s) {
  return p.batch * p.heads * p.queries * s.slots;
}

}  // namespace

bool takes(const View& q, const View& v) {
  return (q.dtype == kF32 || q.dtype == kBF16 || q.dtype == kF16) && q.shape[1] <= kRows &&
         std::max(q.shape[3], v.shape[3]) <= 256;
}

size_t attention_workspace(const View& q, const View& k, const View& v,
                           const AttentionMask& mask) {
  const Problem p = problem_of(q, k, mask, 1);
  const Segments s = segments_of(p, v);
  const auto count = static_cast<size_t>(segments_in_all(p, s));
  return line_align(count * static_cast<size_t>(s.width) * sizeof(float)) +
         line_align(count * sizeof(Softmax<float>));
}

void attention(const Stream& stream, const View& q, const View& k, const View& v,
               const AttentionMask& mask, double scale, const View& out, const View& lse,
               Workspace workspace) {
  const Problem p = problem_of(q, k, mask, scale);
  const int64_t queries = p.batch * p.heads * p.queries;
  if (queries == 0) return;
  Segments s = segments_of(p, v);
  Carver carver("attention", workspace);
  s.sums = carver.take<float>(segments_in_all(p, s) * s.width);
  s.rows = carver.take<Softmax<float>>(segments_in_all(p, s));
  const int64_t tiles = blocks_for(p.queries * (p.heads / p.key_heads), kRows);
  const int64_t blocks = p.batch * p.key_heads * tiles * s.slots;
  if (q.dtype == kBF16 || q.dtype == kF16)
    fragments::attention_of_segments(stream, q, k, v, mask, scale, s, blocks, tiles);
  else
    visit_tiles("attention", q, v, [&]<class K, class V>() {
      if constexpr (std::is_same_v<typename K::C, float>) {
        using S = Sizes<K::kWidth, V::kWidth>;
        const auto run = [&]<bool kWhole>() {
          launch("attention", stream, {.blocks = blocks, .threads = kThreads, .shared_bytes = S::kBytes},
                 attention_of_segments<S, kWhole>, p, Heads(q), Heads(k), Heads(v), s, Begins(mask), tiles);
        };
        if (in_whole_packs(k) && in_whole_packs(v)) run.template operator()<true>();
        else run.template operator()<false>();
      }
    });
  launch("attention", stream, {.blocks = queries, .threads = kCombining}, attention_of_rows, p, s,
         out.dtype, Heads(out), PerQuery<float>(lse), Begins(mask));
}

}  // namespace sheaf::kernels::cuda::decode
