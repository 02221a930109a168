// Shared code of all attention kernels, however they compute products: sizes and operands of a call, which rows a block processes,
// and which keys a query sees.
#pragma once

#include <algorithm>

#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cuda/attention_softmax.h"

namespace sheaf::kernels::cuda::attention_tiles {

/// Sizes of one call.
struct Problem {
  int64_t batch, queries, keys, heads, key_heads;
  bool causal;
  int64_t window;  ///< at most as many as keys
  double scale;
  double softcap;  ///< of scores; 0: none

  /// With a causal mask, keys before the first query's own; less than 0 if some queries see none.
  __host__ __device__ int64_t past() const { return keys - queries; }
  /// The number of keys, from the first on, that query t sees.
  __host__ __device__ int64_t visible(int64_t t) const {
    if (!causal) return keys;
    const int64_t seen = t + 1 + past();
    return seen < 0 ? 0 : seen < keys ? seen : keys;
  }
};

/// [B, T, H, width], the last dimension dense.
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

/// A number per query, [B, H, T], the last dimension dense.
template <class C>
struct PerQuery {
  C* data;
  int64_t batch, head;  ///< strides
  explicit PerQuery(const View& v) : data(v.as<C>()), batch(v.strides[0]), head(v.strides[1]) {}
  __device__ C& at(int64_t b, int64_t h, int64_t t) const { return data[b * batch + h * head + t]; }
};

/// The masking of scores in addition to the causal mask: nothing, or any of documents, a window and a softcap. Kernels are compiled for
/// these two cases, not separately for documents and windows, which change the code around the products, not in them.
enum class Hides { nothing, something };

/// A score, after the softcap if there is one.
template <Hides kHides, class C>
__device__ inline C capped(const Problem& p, C score) {
  if (kHides == Hides::nothing || p.softcap == 0) return score;
  const C cap = static_cast<C>(p.softcap);
  if constexpr (std::is_same_v<C, float>) return cap * tanhf(score / cap);
  else return cap * ::tanh(score / cap);
}
/// Its derivative, in terms of the result.
template <Hides kHides, class C>
__device__ inline C slope_of_capped(const Problem& p, C score) {
  if (kHides == Hides::nothing || p.softcap == 0) return C(1);
  const C t = score / static_cast<C>(p.softcap);
  return C(1) - t * t;
}

/// Calls f.operator()<hides>() as `mask` requires.
template <class F>
void visit_hides(const AttentionMask& mask, F&& f) {
  if (mask.window || mask.has_documents() || mask.softcap != 0) f.template operator()<Hides::something>();
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

  /// The end of the keys that query t, one of its own, sees: without a causal mask, of the document's.
  __device__ int64_t visible(const Problem& p, int64_t t) const {
    const int64_t seen = p.visible(t);
    return seen < keys ? seen : keys;
  }
};

/// Where the documents of queries and, without a causal mask, of keys begin, i32[B, T] and [B, S], dense in the last dimension; null if
/// a sequence is one document.
struct Begins {
  const int32_t *data = nullptr, *keys = nullptr;
  int64_t batch = 0, key_batch = 0;  ///< strides
  explicit Begins(const AttentionMask& mask) {
    if (!mask.has_documents() || mask.begins.numel() == 0) return;
    data = mask.begins.as<const int32_t>(), batch = mask.begins.strides[0];
    if (!mask.causal) keys = mask.key_begins.as<const int32_t>(), key_batch = mask.key_begins.strides[0];
  }
  /// The document of query t. Whatever the values are, t is in it, and none of its rows is outside of the operands.
  __device__ Document of_query(const Problem& p, int64_t b, int64_t t) const {
    const int32_t* row = data + b * batch;
    const int64_t begin = row[t], behind = end_of(row, t + 1, p.queries, begin);
    if (!p.causal) {
      const int64_t key = begin < 0 ? 0 : begin < p.keys ? begin : p.keys;
      return {end_of(row, 0, t, begin - 1), behind, key, end_of(keys + b * key_batch, key, p.keys, begin)};
    }
    const int64_t itself = t + p.past(), key = begin < 0 ? 0 : begin < itself ? begin : itself, first = key - p.past();
    return {first < 0 ? 0 : first, behind, key, behind + p.past()};
  }
  /// The document of key s, which is in it. Keys that no query sees are in documents without queries.
  __device__ Document of_key(const Problem& p, int64_t b, int64_t s) const {
    if (!p.causal) {
      const int32_t *row = data + b * batch, *key_row = keys + b * key_batch;
      const int64_t begin = key_row[s], first = end_of(row, 0, p.queries, begin - 1);
      return {first, end_of(row, first, p.queries, begin), begin < 0 ? 0 : begin < s ? begin : s, end_of(key_row, s + 1, p.keys, begin)};
    }
    if (s >= p.past()) return of_query(p, b, s - p.past());
    const Document first = of_query(p, b, 0);
    return s < first.first_key ? Document{0, 0, 0, first.first_key} : first;
  }

 private:
  /// The first of rows [low, high) whose document begins after `begin`; `high` if there is none.
  __device__ static int64_t end_of(const int32_t* row, int64_t low, int64_t high, int64_t begin) {
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (row[middle] > begin) high = middle;
      else low = middle + 1;
    }
    return low;
  }
};

/// This block's queries among `blocks` tiles of each head. The last ones, which see the most keys,
/// come first.
template <int kTile>
__device__ inline QueryBlock query_block(const Problem& p, int64_t blocks) {
  QueryBlock q;
  q.pair = blockIdx.x % (p.batch * p.heads), q.b = q.pair / p.heads, q.h = q.pair % p.heads;
  q.g = q.h / (p.heads / p.key_heads);
  q.first = (blocks - 1 - blockIdx.x / (p.batch * p.heads)) * kTile;
  return q;
}

enum class TilesOf { queries, keys };

/// Calls f(document, n) for the tile of rows from n on of the sequence; with documents, for the tiles of sequence b's documents that
/// begin in it, so that all calls together cover all tiles of all documents.
template <int kTile, Hides kHides, TilesOf kOf, class F>
__device__ inline void for_each_tile(const Problem& p, const Begins& begins, int64_t b, int64_t first, F&& f) {
  constexpr bool kKeys = kOf == TilesOf::keys;
  const Document whole{0, p.queries, 0, p.keys};
  if constexpr (kHides == Hides::nothing) {
    f(whole, first);
  } else {
    const int64_t rows = kKeys ? p.keys : p.queries, end = first + kTile < rows ? first + kTile : rows;
    for (int64_t t = first; t < end;) {
      Document d = whole;
      int64_t n = first;
      if (begins.data) {
        d = kKeys ? begins.of_key(p, b, t) : begins.of_query(p, b, t);
        const int64_t begin = kKeys ? d.first_key : d.first_query;
        n = begin + (t - begin + kTile - 1) / kTile * kTile;
      }
      t = kKeys ? d.keys : d.queries;
      for (const int64_t behind = t < end ? t : end; n < behind; n += kTile) f(d, n);
    }
  }
}

/// The end of the keys that any query of the tile from `first` on sees.
template <int kTile>
__device__ inline int64_t keys_seen(const Problem& p, const Document& d, int64_t first) {
  return d.visible(p, (first + kTile < d.queries ? first + kTile : d.queries) - 1);
}

/// The number of keys before the window of a query to which the first `seen` keys are visible; 0 or less if there are
/// none.
template <Hides kHides>
__device__ inline int64_t keys_hidden(const Problem& p, int64_t seen) {
  return kHides != Hides::nothing && p.window ? seen - p.window : 0;
}

/// Whether each of queries [first, first + kQueries) sees each of keys [key, key + kKeys): most tiles need no mask.
template <int kQueries, int kKeys, Hides kHides>
__device__ inline bool all_see_all(const Problem& p, const Document& d, int64_t first, int64_t key) {
  if (first + kQueries > d.queries || key + kKeys > d.visible(p, first)) return false;
  return keys_hidden<kHides>(p, p.visible(first + kQueries - 1)) <= key;
}

/// The beginning of the first tile of keys that any of them sees: tiles begin at the same keys as without a window.
template <int kTile, Hides kHides>
__device__ inline int64_t first_key_seen(const Problem& p, const Document& d, int64_t first) {
  const int64_t hidden = keys_hidden<kHides>(p, p.visible(first)) - d.first_key;
  return hidden > 0 ? d.first_key + hidden / kTile * kTile : d.first_key;
}

/// The beginning of the segment after that of this key.
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

/// Those of the tile from `key` on, for a query to which the first `seen` keys are visible (Problem).
template <int kTile, Hides kHides>
__device__ inline SeenKeys seen_keys(const Problem& p, int64_t key, int64_t seen) {
  const auto in_tile = [&](int64_t n) {
    return static_cast<int>(n < key ? 0 : n - key < kTile ? n - key : kTile);
  };
  return {in_tile(keys_hidden<kHides>(p, seen)), in_tile(seen)};
}

/// Rows that begin and end at multiples of 16 bytes.
inline bool in_whole_packs(const View& v) {
  const auto size = static_cast<int64_t>(size_of(v.dtype));
  bool out = aligned16(v.data) && v.shape[3] * size % 16 == 0;
  for (int d = 0; d < 3; ++d) out = out && (v.strides[d] * size % 16 == 0 || v.shape[d] <= 1);
  return out;
}

/// None of our kernels takes wider heads.
inline void check_widths(const char* who, const View& q, const View& v) {
  const int64_t larger = std::max(q.shape[3], v.shape[3]);
  check<ShapeError>(larger <= 256, '[', who, "] heads of more than 256 elements: ", larger);
}

/// Calls f.operator()<W, E>() with widths into which a call's queries and keys, and its values, fit; E is at most W.
template <class F>
void visit_widths(const char* who, const View& q, const View& v, F&& f) {
  check_widths(who, q, v);
  const int64_t width = q.shape[3], of_values = v.shape[3], larger = std::max(width, of_values);
  if (larger <= 64) f.template operator()<64, 64>();
  else if (larger <= 128) f.template operator()<128, 128>();
  else if (width <= 192 && of_values <= 128) f.template operator()<192, 128>();  // DeepSeek's
  else f.template operator()<256, 256>();
}

inline Problem problem_of(const View& q, const View& k, const AttentionMask& mask, double scale) {
  return {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], mask.causal,
          mask.window < k.shape[1] ? mask.window : k.shape[1], scale, mask.softcap};
}

}  // namespace sheaf::kernels::cuda::attention_tiles
