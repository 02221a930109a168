#include "sheaf/kernels/cuda/attention_decode.h"

#include <algorithm>
#include <bit>

#include "sheaf/kernels/cuda/attention_tiles.h"
#include "sheaf/kernels/cuda/workspace.h"

namespace sheaf::kernels::cuda::decode {

using namespace attention_tiles;

namespace {

constexpr int kRows = 16;  // of a block: queries of the heads that share a key head
constexpr int kTile = 64;  // keys, as many as attention_blocked.cu takes for these types
constexpr int kScores = kTile / kSide;
constexpr int kColumns = 4;  // of a result's row, a thread

/// What stands in shared memory: queries in f32, keys and then values as they are, scores and then
/// weights.
template <class T, int kWidth_, int kValueWidth_>
struct Sizes {
  using Element = T;
  static constexpr int kWidth = kWidth_, kValueWidth = kValueWidth_;
  static constexpr int kVec = Pack<T>::kSize;
  // 16 bytes more than a row, so that those of a warp meet all banks.
  static constexpr int kStride = kWidth + kVec, kQueryStride = kWidth + 4, kScoreStride = kTile + 4;
  static constexpr size_t kTileBytes = size_t{kTile} * kStride * sizeof(T);
  static constexpr size_t kBytes =
      kTileBytes + size_t{kRows} * (kQueryStride + kScoreStride + 1) * sizeof(float);
  static_assert(kValueWidth <= kWidth);
  // On a multiprocessor, as registers allow: while one waits for memory, others compute.
  static constexpr int kBlocks = kWidth * sizeof(T) <= 256 ? 3 : kWidth * sizeof(T) <= 512 ? 2 : 1;
};

/// Of each query's segments: segment c lies in slot c % slots.
struct Segments {
  float* sums;           ///< [B, H, T, slots, width]
  Softmax<float>* rows;  ///< [B, H, T, slots]
  int slots, width;      ///< that of values, rounded up to kColumns

  __device__ int64_t first_slot(const Problem& p, int64_t b, int64_t h, int64_t t) const {
    return ((b * p.heads + h) * p.queries + t) * slots;
  }
};

/// Segments of which the queries of a block may see something: at most so many, one behind another.
int64_t slots_of(const Problem& p) {
  const int64_t all = std::max<int64_t>(blocks_for(p.keys, kSegment), 1);
  if (p.window == 0) return all;
  const int64_t queries = std::min<int64_t>(p.queries, kRows);
  return std::min(all, blocks_for(p.window + queries - 1, kSegment) + 1);
}

/// The first segment of a document that a query sees, and the one behind its last.
struct SeenSegments {
  int64_t first, behind;
};
__device__ inline SeenSegments segments_seen(const Problem& p, const Document& d, int64_t t) {
  const int64_t seen = p.visible(t) - d.first_key, hidden = p.window ? seen - p.window : 0;
  return {hidden > 0 ? hidden / kSegment : 0, seen > 0 ? blocks_for(seen, kSegment) : 0};
}

__device__ inline Document document_of(const Problem& p, const Begins& begins, int64_t b,
                                       int64_t t) {
  return begins.data ? begins.of_query(p, b, t) : Document{0, p.queries, 0, p.keys};
}

/// A thread's part of a tile, on its way from global to shared memory: it is asked for before the
/// product with what lies there, and placed behind it. Rows that are not made of whole packs come
/// element by element when they are placed.
template <class S, int kWidth>
struct Fetched {
  using T = typename S::Element;
  static constexpr int kAcross = std::bit_ceil(unsigned{kWidth / S::kVec}),
                       kStep = kThreads / kAcross, kPer = kTile / kStep;
  Pack<T> packs[kPer];

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * S::kVec; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kAcross; }

  /// Rows [first, first + kTile) of a head, of which `count` are there; zeros past them.
  template <bool kWhole>
  __device__ void fetch(const Heads& from, const T* first, int count) {
    if constexpr (kWhole) {
      const T* at = first + row() * from.time + column();
#pragma unroll
      for (int i = 0; i < kPer; ++i, at += kStep * from.time)
        packs[i] =
            row() + i * kStep < count && column() < from.width ? load_pack(at) : Pack<T>{};
    }
  }
  template <bool kWhole>
  __device__ void place(const Heads& from, const T* first, int count, T* tile) const {
    if (column() >= from.width) return;
    T* to = tile + row() * S::kStride + column();
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) store_pack(to + i * kStep * S::kStride, packs[i]);
    } else {
      for (int i = row(); i < kTile; i += kStep, to += kStep * S::kStride)
        store_pack(to, i < count ? load_chunk(first + i * from.time, column(), from.width)
                                 : Pack<T>{});
    }
  }
};

/// Scores of rows [low, high) with the keys of a tile: a thread has one key and every fourth row.
template <class S>
__device__ void score_rows(const float* queries, const typename S::Element* tile, int width,
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
      const float* row = queries + (first + i * kStep) * S::kQueryStride + d;
#pragma unroll
      for (int n = 0; n < S::kVec; n += 4) {
        const Pack<float> x = load_pack(row + n);
#pragma unroll
        for (int m = 0; m < 4; ++m)
          sums[i] = fused_sum(x.v[m], convert_to<float>(pack.v[n + m]), sums[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (first + i * kStep < high) scores[(first + i * kStep) * S::kScoreStride + key] = sums[i];
}

/// Rows [low, high) of the result: a thread has kColumns columns of every kStep-th.
template <class S>
struct Results {
  using T = typename S::Element;
  static constexpr int kAcross = S::kValueWidth / kColumns, kStep = kThreads / kAcross,
                       kPer = kRows / kStep;
  float sums[kPer][kColumns] = {};

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * kColumns; }
  __device__ static int row(int low, int i) {
    return low + static_cast<int>(threadIdx.x) / kAcross + i * kStep;
  }

  /// Adds weights times the values of a tile.
  __device__ void accumulate(const float* weights, const float* shrinks, const T* tile, int width,
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
        const T* at = tile + (r + m) * S::kStride + column();
        const auto v = *reinterpret_cast<const Group<T, kColumns>*>(at);
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          if (row(low, i) < high)
#pragma unroll
            for (int k = 0; k < kColumns; ++k)
              sums[i][k] = fused_sum(w[i].v[m], convert_to<float>(v.v[k]), sums[i][k]);
      }
    }
  }
};

// A block takes up to kRows of a key head's T H / G rows (query t of its head n is row t H / G + n)
// and one segment of their keys. Documents that begin among the queries are taken one after the
// other; all but the first are shorter than a segment.
template <class S, bool kWhole>
__global__ void __launch_bounds__(kThreads, S::kBlocks)
    attention_of_segments(Problem p, Heads q, Heads k, Heads v, Segments to, Begins begins,
                          int64_t tiles) {
  using T = typename S::Element;
  float* const queries = dynamic_shared<float>();
  float* const weights = queries + kRows * S::kQueryStride;
  float* const shrinks = weights + kRows * S::kScoreStride;
  T* const tile = reinterpret_cast<T*>(shrinks + kRows);

  const int64_t slot = blockIdx.x % to.slots, block = blockIdx.x / to.slots, pair = block / tiles,
                b = pair / p.key_heads, g = pair % p.key_heads;
  const int group = static_cast<int>(p.heads / p.key_heads),
            first_row = static_cast<int>(block % tiles) * kRows,
            left = static_cast<int>(p.queries) * group - first_row,
            rows = left < kRows ? left : kRows;
  const auto query = [&](int row) -> int64_t { return (first_row + row) / group; };
  const auto head = [&](int row) -> int64_t { return g * group + (first_row + row) % group; };

  constexpr int kQueryChunks = S::kWidth / S::kVec;
  for (int n = threadIdx.x; n < rows * kQueryChunks; n += kThreads) {
    const int row = n / kQueryChunks, at = n % kQueryChunks * S::kVec;
    if (at >= q.width) continue;
    const Pack<T> pack =
        load_chunk(static_cast<const T*>(q.data) + q.offset(b, query(row), head(row)), at, q.width);
#pragma unroll
    for (int m = 0; m < S::kVec; ++m)
      queries[row * S::kQueryStride + at + m] = convert_to<float>(pack.v[m]);
  }

  const int64_t queries_behind = query(rows - 1) + 1;
  for (int64_t t = query(0), behind = t; t < queries_behind; t = behind) {
    const Document d = document_of(p, begins, b, t);
    behind = std::min(d.queries, queries_behind);
    // This block's among the segments that they see, which begin with number `seen`.
    const int64_t seen = segments_seen(p, d, t).first,
                  c = seen + (slot - seen % to.slots + to.slots) % to.slots,
                  begin = d.first_key + c * kSegment,
                  end = std::min(begin + kSegment, p.visible(behind - 1));
    if (begin >= end) continue;
    const int low = static_cast<int>(std::max<int64_t>(t * group - first_row, 0)),
              high = static_cast<int>(std::min<int64_t>(behind * group - first_row, rows));
    // Tiles begin where they do without a window.
    const int64_t hidden = p.window ? p.visible(t) - p.window - begin : 0,
                  first = hidden > 0 ? begin + hidden / kTile * kTile : begin;
    const T* at_k = static_cast<const T*>(k.data) + k.offset(b, first, g);
    const T* at_v = static_cast<const T*>(v.data) + v.offset(b, first, g);
    // Keys from `first` on: those to go over, those that there are, and those that the query of row
    // ty() sees, of which this thread has scores; none if it is of another document.
    const auto from_first = [&](int64_t key) {
      return static_cast<int>(std::clamp<int64_t>(key - first, 0, kSegment));
    };
    const int count = from_first(end), there = from_first(d.keys);
    const bool mine = ty() >= low && ty() < high;
    const int64_t visible = mine ? p.visible(query(ty())) : 0;
    const int sees_from = p.window ? from_first(visible - p.window) : 0,
              sees_to = from_first(visible);

    Results<S> results;
    Softmax<float> segment;
    Fetched<S, S::kWidth> of_keys;
    Fetched<S, S::kValueWidth> of_values;
    of_keys.template fetch<kWhole>(k, at_k, there);
    __syncthreads();
    of_keys.template place<kWhole>(k, at_k, there, tile);
    for (int key = 0; key < count; key += kTile) {
      __syncthreads();
      of_values.template fetch<kWhole>(v, at_v, there - key);
      score_rows<S>(queries, tile, q.width, low, high, weights);
      __syncthreads();
      float scores[kScores];
      float* const row = weights + ty() * S::kScoreStride + tx();
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        const int s = key + tx() + kSide * j;
        scores[j] = s >= sees_from && s < sees_to
                        ? rounded_product(row[kSide * j], static_cast<float>(p.scale))
                        : kHidden<float>;
      }
      const float shrink = add_tile(segment, scores);
#pragma unroll
      for (int j = 0; j < kScores; ++j) row[kSide * j] = scores[j];
      if (tx() == 0) shrinks[ty()] = shrink;
      of_values.template place<kWhole>(v, at_v, there - key, tile);
      __syncthreads();
      at_k += kTile * k.time, at_v += kTile * v.time;
      const bool more = key + kTile < count;
      if (more) of_keys.template fetch<kWhole>(k, at_k, there - key - kTile);
      results.accumulate(weights, shrinks, tile, v.width, low, high);
      __syncthreads();
      if (more) of_keys.template place<kWhole>(k, at_k, there - key - kTile, tile);
    }
    close_segment(segment);
    if (mine && tx() == 0) to.rows[to.first_slot(p, b, head(ty()), query(ty())) + slot] = segment;
    const int column = Results<S>::column();
#pragma unroll
    for (int i = 0; i < Results<S>::kPer; ++i) {
      const int n = Results<S>::row(low, i);
      if (n >= high || column >= v.width) continue;
      Pack<float> pack;
#pragma unroll
      for (int m = 0; m < kColumns; ++m) pack.v[m] = results.sums[i][m];
      store_pack(to.sums + (to.first_slot(p, b, head(n), query(n)) + slot) * to.width + column,
                 pack);
    }
  }
}

constexpr int kCombining = 128;  // threads; each has up to two columns

// A block puts the segments of one query of a head together. What each counts depends on the
// largest scores before it alone, so it is known for many at once; sums are made one by one.
__global__ void __launch_bounds__(kCombining)
    attention_of_rows(Problem p, Segments from, Heads out, PerQuery<float> lse, Begins begins) {
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
      store_any(p.dtype, out.data, out.offset(b, t, h) + column, sums[i] * ending.scale);
  }
  if (thread == 0) lse.at(b, h, t) = ending.lse;
}

/// Rows that begin at 16 bytes and end there.
bool in_whole_packs(const View& v) {
  const auto size = static_cast<int64_t>(size_of(v.dtype));
  bool out = aligned16(v.data) && v.shape[3] * size % 16 == 0;
  for (int d = 0; d < 3; ++d) out = out && (v.strides[d] * size % 16 == 0 || v.shape[d] <= 1);
  return out;
}

/// Without memory.
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
  visit_tiles("attention", q, v, [&]<class K, class V>() {
    visit_floating("attention", q.dtype, [&]<class T>() {
      if constexpr (!std::is_same_v<T, double> && !std::is_same_v<typename K::C, double>) {
        using S = Sizes<T, K::kWidth, V::kWidth>;
        const auto run = [&]<bool kWhole>() {
          launch("attention", stream,
                 {.blocks = p.batch * p.key_heads * tiles * s.slots,
                  .threads = kThreads,
                  .shared_bytes = S::kBytes},
                 attention_of_segments<S, kWhole>, p, Heads(q), Heads(k), Heads(v), s,
                 Begins(mask), tiles);
        };
        if (in_whole_packs(k) && in_whole_packs(v)) run.template operator()<true>();
        else run.template operator()<false>();
      }
    });
  });
  launch("attention", stream, {.blocks = queries, .threads = kCombining}, attention_of_rows, p, s,
         Heads(out), PerQuery<float>(lse), Begins(mask));
}

}  // namespace sheaf::kernels::cuda::decode
