// Tiles of attention's products in shared memory, for a block of 256 threads.
//
// A tile holds kTile rows of up to kWidth elements in the compute type C. Thread (ty, tx) of 16 x
// 16 owns rows ty, ty + 16, ... of a product, and of its columns either tx, tx + 16, ... (scores)
// or 16 bytes at tx, tx + 16, ... (results): neighbours read neighbouring 16 bytes, or the same.
#pragma once

#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cuda/attention_softmax.h"
#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda::attention_tiles {

inline constexpr int kThreads = 256;

/// Sizes of one call.
struct Problem {
  int64_t batch, queries, keys, heads, key_heads;
  bool causal;
  int64_t window;  ///< at most as many as keys
  double scale;
  DType dtype;

  /// Keys before the first query's own; less than 0 if some queries see none.
  __host__ __device__ int64_t past() const { return keys - queries; }
  /// Keys that query t sees: the first so many.
  __host__ __device__ int64_t visible(int64_t t) const {
    if (!causal) return keys;
    const int64_t seen = t + 1 + past();
    return seen < 0 ? 0 : seen < keys ? seen : keys;
  }
};

/// [B, T, H, width] of `dtype`, the last dimension dense.
struct Heads {
  void* data;
  int64_t batch, time, head;  ///< strides
  int width;
  Heads(const View& v)
      : data(v.data),
        batch(v.strides[0]),
        time(v.strides[1]),
        head(v.strides[2]),
        width(static_cast<int>(v.shape[3])) {}
  __device__ int64_t offset(int64_t b, int64_t t, int64_t h) const {
    return b * batch + t * time + h * head;
  }
};

/// A number of each query, [B, H, T], the last dimension dense.
template <class C>
struct PerQuery {
  C* data;
  int64_t batch, head;  ///< strides
  explicit PerQuery(const View& v) : data(v.as<C>()), batch(v.strides[0]), head(v.strides[1]) {}
  __device__ C& at(int64_t b, int64_t h, int64_t t) const { return data[b * batch + h * head + t]; }
};

/// What hides keys beside the causal mask: nothing, or documents, a window or both. Kernels are compiled for each, and not
/// for documents and windows apart: those differ around the products, not in them.
enum class Hides { nothing, something };

/// Calls f.operator()<hides>() with what `mask` asks for.
template <class F>
void visit_hides(const AttentionMask& mask, F&& f) {
  if (mask.window || mask.has_documents()) f.template operator()<Hides::something>();
  else f.template operator()<Hides::nothing>();
}

/// The queries of a block, a tile of one head's: from `first` on, of head h, key head g, of
/// sequence b; pair = b H + h.
struct QueryBlock {
  int64_t pair, b, h, g, first;
};

/// Rows that attend to each other, a sequence's or a document's: queries [first_query, queries) and
/// keys [first_key, keys).
struct Document {
  int64_t first_query, queries, first_key, keys;
};

/// Where the document of each query begins, i32[B, T] dense in T; null where sequences are one.
struct Begins {
  const int32_t* data = nullptr;
  int64_t batch = 0;  ///< stride
  explicit Begins(const AttentionMask& mask) {
    if (mask.has_documents() && mask.begins.numel() > 0)
      data = mask.begins.as<const int32_t>(), batch = mask.begins.strides[0];
  }
  /// The document of query t. Whatever lies there, t is in it.
  __device__ Document of_query(const Problem& p, int64_t b, int64_t t) const {
    const int32_t* row = data + b * batch;
    const int64_t begin = row[t];
    int64_t low = t + 1, high = p.queries;  // the first behind it is in [low, high]
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (row[middle] > begin) high = middle;
      else low = middle + 1;
    }
    const int64_t itself = t + p.past(), key = begin < 0 ? 0 : begin < itself ? begin : itself;
    return {key < p.past() ? 0 : key - p.past(), low, key, low + p.past()};
  }
  /// That of key s. Those before the first query's document are one without queries.
  __device__ Document of_key(const Problem& p, int64_t b, int64_t s) const {
    if (s >= p.past()) return of_query(p, b, s - p.past());
    const Document first = of_query(p, b, 0);
    return s < first.first_key ? Document{0, 0, 0, first.first_key} : first;
  }
};

template <class C_, int kWidth_, int kTile_>
struct Tiles {
  using C = C_;
  static constexpr int kWidth = kWidth_, kTile = kTile_;
  static constexpr int kVec = Pack<C>::kSize;
  static constexpr int kPer = kTile / kSide;               // rows, and scores of a row, a thread
  static constexpr int kChunks = kWidth / (kSide * kVec);  // 16 bytes of a result's row, a thread
  static constexpr int kStride = kWidth + kVec;            // the rows of a warp meet all banks
  static constexpr int kScoreStride = kTile + kVec;
  static constexpr size_t kBytes = size_t{kTile} * kStride * sizeof(C);
  static constexpr size_t kScoreBytes = size_t{kTile} * kScoreStride * sizeof(C);
  using Scores = C[kPer][kPer];
  using Results = C[kPer][kChunks][kVec];
};

__device__ inline int tx() { return static_cast<int>(threadIdx.x) % kSide; }
__device__ inline int ty() { return static_cast<int>(threadIdx.x) / kSide; }

/// This block's queries among `blocks` tiles of each head. The last ones, which see the most keys,
/// come first.
template <class S>
__device__ inline QueryBlock query_block(const Problem& p, int64_t blocks) {
  QueryBlock q;
  q.pair = blockIdx.x % (p.batch * p.heads), q.b = q.pair / p.heads, q.h = q.pair % p.heads;
  q.g = q.h / (p.heads / p.key_heads);
  q.first = (blocks - 1 - blockIdx.x / (p.batch * p.heads)) * S::kTile;
  return q;
}

enum class TilesOf { queries, keys };

/// Calls f(document, n) for the tile of rows from n on of the sequence; where there are documents, for the tiles of those of
/// sequence b that begin in it, which together are all tiles of all documents.
template <class S, Hides kHides, TilesOf kOf, class F>
__device__ inline void for_each_tile(const Problem& p, const Begins& begins, int64_t b, int64_t first, F&& f) {
  constexpr bool kKeys = kOf == TilesOf::keys;
  const Document whole{0, p.queries, 0, p.keys};
  if constexpr (kHides == Hides::nothing) {
    f(whole, first);
  } else {
    const int64_t rows = kKeys ? p.keys : p.queries, end = first + S::kTile < rows ? first + S::kTile : rows;
    for (int64_t t = first; t < end;) {
      Document d = whole;
      int64_t n = first;
      if (begins.data) {
        d = kKeys ? begins.of_key(p, b, t) : begins.of_query(p, b, t);
        const int64_t begin = kKeys ? d.first_key : d.first_query;
        n = begin + (t - begin + S::kTile - 1) / S::kTile * S::kTile;
      }
      t = kKeys ? d.keys : d.queries;
      for (const int64_t behind = t < end ? t : end; n < behind; n += S::kTile) f(d, n);
    }
  }
}

/// Keys that some query of the tile from `first` on sees are those up to here.
template <class S>
__device__ inline int64_t keys_seen(const Problem& p, const Document& d, int64_t first) {
  return p.visible((first + S::kTile < d.queries ? first + S::kTile : d.queries) - 1);
}

/// Keys before a window, of those that the query sees to which the first `seen` are visible; 0 or less if there are none.
template <Hides kHides>
__device__ inline int64_t keys_hidden(const Problem& p, int64_t seen) {
  return kHides != Hides::nothing && p.window ? seen - p.window : 0;
}

/// Where the first tile of keys begins that some of them sees: they begin where they do without a window.
template <class S, Hides kHides>
__device__ inline int64_t first_key_seen(const Problem& p, const Document& d, int64_t first) {
  const int64_t hidden = keys_hidden<kHides>(p, p.visible(first)) - d.first_key;
  return hidden > 0 ? d.first_key + hidden / S::kTile * S::kTile : d.first_key;
}

/// Where the segment of keys behind that of this key begins.
__device__ inline int64_t segment_behind(const Document& d, int64_t key) {
  return d.first_key + ((key - d.first_key) / kSegment + 1) * kSegment;
}

/// Keys of a tile, counted from its first, that a query sees.
struct SeenKeys {
  int begin, behind;
  __device__ bool has(int n) const {
    return static_cast<unsigned>(n - begin) < static_cast<unsigned>(behind - begin);
  }
};

/// Those of the tile from `key` on, of the query to which the first `seen` keys are visible (Problem).
template <class S, Hides kHides>
__device__ inline SeenKeys seen_keys(const Problem& p, int64_t key, int64_t seen) {
  const auto in_tile = [&](int64_t n) {
    return static_cast<int>(n < key ? 0 : n - key < S::kTile ? n - key : S::kTile);
  };
  return {in_tile(keys_hidden<kHides>(p, seen)), in_tile(seen)};
}

template <class S, class T>
__device__ void load_tile_of(const T* rows, int64_t stride, int64_t count, int width,
                             typename S::C* tile) {
  using C = typename S::C;
  constexpr int kSize = Pack<T>::kSize;
  const int chunks = static_cast<int>(blocks_for(width, kSize));
  for (int n = threadIdx.x; n < S::kTile * chunks; n += kThreads) {
    const int row = n / chunks, at = (n - row * chunks) * kSize;
    Pack<T> pack{};
    if (row < count) pack = load_chunk(rows + row * stride, at, width);
    C* to = tile + row * S::kStride + at;
#pragma unroll
    for (int k = 0; k < kSize; k += S::kVec) {
      Pack<C> wide;
#pragma unroll
      for (int m = 0; m < S::kVec; ++m) wide.v[m] = convert_to<C>(pack.v[k + m]);
      store_pack(to + k, wide);
    }
  }
}

/// Calls f.operator()<T>() with the type of a call's elements.
template <class C, class F>
__device__ inline void visit_elements(const Problem& p, F&& f) {
  if constexpr (std::is_same_v<C, double>) f.template operator()<double>();
  else if (p.dtype == DType::f32) f.template operator()<float>();
  else if (p.dtype == DType::bf16) f.template operator()<bf16>();
  else f.template operator()<f16>();
}

/// Rows [first, first + kTile) of a head's `count`; zeros past the last, and up to the next
/// multiple of kVec behind the width.
template <class S>
__device__ void load_tile(const Problem& p, const Heads& from, int64_t b, int64_t h, int64_t first,
                          int64_t count, typename S::C* tile) {
  const int64_t at = from.offset(b, first, h), rows = count - first;
  visit_elements<typename S::C>(p, [&]<class T>() {
    load_tile_of<S>(static_cast<const T*>(from.data) + at, from.time, rows, from.width, tile);
  });
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

/// The scores of this thread to where accumulate_rows reads them.
template <class S>
__device__ void store_scores(const typename S::Scores& scores, typename S::C* to) {
#pragma unroll
  for (int i = 0; i < S::kPer; ++i)
#pragma unroll
    for (int j = 0; j < S::kPer; ++j)
      to[(ty() + kSide * i) * S::kScoreStride + tx() + kSide * j] = scores[i][j];
}

/// Columns of results at which this thread's 16 bytes number c begin.
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

/// Rounds row i of the results, times `scale`, into row `t` of a head.
template <class S>
__device__ void store_row(const Problem& p, const typename S::Results& results, int i,
                          typename S::C scale, const Heads& to, int64_t b, int64_t t, int64_t h) {
  const int64_t at = to.offset(b, t, h) + column<S>(0);
  const int width = to.width - column<S>(0);
  visit_elements<typename S::C>(p, [&]<class T>() {
    T* row = static_cast<T*>(to.data) + at;
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c)
#pragma unroll
      for (int k = 0; k < S::kVec; ++k) {
        const int n = kSide * S::kVec * c + k;
        if (n < width) row[n] = element<T>(results[i][c][k] * scale);
      }
  });
}

/// Calls f.operator()<S, V>() with the tiles for queries and keys, and those for values and outputs,
/// which have as many rows and are at most as wide.
template <class F>
void visit_tiles(const char* who, const View& q, const View& v, F&& f) {
  const int64_t width = q.shape[3], of_values = v.shape[3], larger = std::max(width, of_values);
  check<ShapeError>(larger <= 256, '[', who, "] heads of more than 256 elements: ", larger);
  const auto equal = [&]<class S>() { f.template operator()<S, S>(); };
  if (q.dtype == kF64)
    equal.template operator()<Tiles<double, 256, 32>>();
  else if (larger <= 64)
    equal.template operator()<Tiles<float, 64, 64>>();
  else if (larger <= 128)
    equal.template operator()<Tiles<float, 128, 64>>();
  else if (width <= 192 && of_values <= 128)  // DeepSeek's
    f.template operator()<Tiles<float, 192, 64>, Tiles<float, 128, 64>>();
  else
    equal.template operator()<Tiles<float, 256, 64>>();
}

inline Problem problem_of(const View& q, const View& k, const AttentionMask& mask, double scale) {
  return {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], mask.causal,
          mask.window < k.shape[1] ? mask.window : k.shape[1], scale, q.dtype};
}

}  // namespace sheaf::kernels::cuda::attention_tiles
