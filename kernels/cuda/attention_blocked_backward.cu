#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/attention_dots.h"
#include "sheaf/kernels/cuda/attention_tiles.h"

namespace sheaf::kernels::cuda::blocked {

using namespace attention_tiles;

namespace {

// With p = exp(scale q·k - lse): ds = p (dout·v - dot) scale, where dot = dout·out of the query;
// dq = sum of ds k, dk = sum of ds q, dv = sum of p dout.

// A block processes kTile queries of a head and loops over the keys that the last of them sees. Documents and windows, also below,
// are handled as in attention_forward.
template <class S, class V, Hides kHides>
__global__ void __launch_bounds__(kThreads, S::kWidth <= 64 ? 2 : 1)
    attention_dq(Problem p, Heads q, Heads k, Heads v, Heads dout, Heads dq,
                 Statistics<typename S::C> rows, int64_t query_blocks, Begins begins) {
  using C = typename S::C;
  C* q_tile = dynamic_shared<C>();
  C* dout_tile = q_tile + S::kBytes / sizeof(C);
  C* tile = dout_tile + V::kBytes / sizeof(C);  // of values, then of keys, which need no less
  C* weights = tile + S::kBytes / sizeof(C);

  const auto [pair, b, h, g, at] = query_block<S::kTile>(p, query_blocks);
  for_each_tile<S::kTile, kHides, TilesOf::queries>(
      p, begins, b, at, [&, pair = pair, b = b, h = h, g = g](const Document& d, int64_t first) {
    const int64_t keys = keys_seen<S::kTile>(p, d, first);
    typename S::Results sums = {};
    C lse[S::kPer], dot[S::kPer];
    int64_t seen[S::kPer];
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      const int64_t t = first + ty() + kSide * i;
      seen[i] = t < d.queries ? d.visible(p, t) : 0;
      lse[i] = seen[i] ? rows.lse.at(b, h, t) : C(0);
      dot[i] = seen[i] ? rows.dot[pair * p.queries + t] : C(0);
    }
    load_tile<S>(q, b, h, first, d.queries, q_tile);
    load_tile<V>(dout, b, h, first, d.queries, dout_tile);
    for (int64_t key = first_key_seen<S::kTile, kHides>(p, d, first); key < keys; key += S::kTile) {
      __syncthreads();
      load_tile<V>(v, b, g, key, d.keys, tile);
      __syncthreads();
      typename S::Scores ds, s;
      multiply_rows<V>(dout_tile, tile, v.width, ds);
      __syncthreads();
      load_tile<S>(k, b, g, key, d.keys, tile);
      __syncthreads();
      multiply_rows<S>(q_tile, tile, q.width, s);
      const C scale = static_cast<C>(p.scale);
#pragma unroll
      for (int i = 0; i < S::kPer; ++i) {
        const SeenKeys sees = seen_keys<S::kTile, kHides>(p, key, seen[i]);
#pragma unroll
        for (int j = 0; j < S::kPer; ++j) {
          const C score = capped<kHides>(p, rounded_product(s[i][j], scale));
          ds[i][j] = sees.has(tx() + kSide * j)
                         ? exponential(score - lse[i]) * (ds[i][j] - dot[i]) * scale * slope_of_capped<kHides>(p, score)
                         : C(0);
        }
      }
      store_scores<S>(ds, weights);
      __syncthreads();
      accumulate_rows<S>(weights, tile, k.width, sums);
    }
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      const int64_t t = first + ty() + kSide * i;
      if (t < d.queries) store_row<S>(sums, i, C(1), dq, b, t, h);
    }
  });
}

/// Queries and the output's gradient are adjacent if shared memory has room; else they alternate in one tile.
template <class S, class V>
constexpr bool kTakeTurns = 2 * (S::kBytes + V::kBytes) + S::kScoreBytes > kMostSharedBytes;

// A block processes kTile keys of a key head and loops over the queries that see some of them, for each query head of the group.
// Scores are transposed: a row is a key's.
template <class S, class V, Hides kHides>
__global__ void __launch_bounds__(kThreads)
    attention_dkv(Problem p, Heads q, Heads k, Heads v, Heads dout, Heads dk, Heads dv,
                  Statistics<typename S::C> rows, Begins begins) {
  using C = typename S::C;
  C* k_tile = dynamic_shared<C>();
  C* v_tile = k_tile + S::kBytes / sizeof(C);
  C* q_tile = v_tile + V::kBytes / sizeof(C);
  C* dout_tile = kTakeTurns<S, V> ? q_tile : q_tile + S::kBytes / sizeof(C);
  C* weights = dout_tile + (kTakeTurns<S, V> ? S::kBytes : V::kBytes) / sizeof(C);

  const int64_t pair = blockIdx.x % (p.batch * p.key_heads), b = pair / p.key_heads,
                g = pair % p.key_heads, group = p.heads / p.key_heads;
  const int64_t at = blockIdx.x / (p.batch * p.key_heads) * S::kTile;
  for_each_tile<S::kTile, kHides, TilesOf::keys>(p, begins, b, at, [&](const Document& d, int64_t key) {
    int64_t first = d.first_query;  // that sees one of the keys
    if (p.causal && key - p.past() > first) first = key - p.past();
    if (kHides == Hides::nothing) first = first / S::kTile * S::kTile;
    int64_t behind = d.queries;
    if (kHides != Hides::nothing && p.window) {  // the last that sees the last of the keys
      const int64_t last = key + S::kTile - 1 + p.window - 1 - p.past();
      if (last + 1 < behind) behind = last + 1;
    }

    typename S::Results dk_sums = {};
    typename V::Results dv_sums = {};
    load_tile<S>(k, b, g, key, d.keys, k_tile);
    load_tile<V>(v, b, g, key, d.keys, v_tile);
    for (int64_t h = g * group; h < (g + 1) * group; ++h)
      for (int64_t t = first; t < behind; t += S::kTile) {
        __syncthreads();
        load_tile<S>(q, b, h, t, d.queries, q_tile);
        if (!kTakeTurns<S, V>) load_tile<V>(dout, b, h, t, d.queries, dout_tile);
        __syncthreads();
        typename S::Scores s, ds;
        multiply_rows<S>(k_tile, q_tile, q.width, s);
        if (kTakeTurns<S, V>) {
          __syncthreads();
          load_tile<V>(dout, b, h, t, d.queries, dout_tile);
          __syncthreads();
        }
        multiply_rows<V>(v_tile, dout_tile, v.width, ds);
        const C scale = static_cast<C>(p.scale);
#pragma unroll
        for (int j = 0; j < S::kPer; ++j) {
          const int64_t query = t + tx() + kSide * j;
          const int64_t seen = query < d.queries ? d.visible(p, query) : 0;
          const C lse = seen ? rows.lse.at(b, h, query) : C(0),
                  dot = seen ? rows.dot[(b * p.heads + h) * p.queries + query] : C(0);
          const SeenKeys sees = seen_keys<S::kTile, kHides>(p, key, seen);
#pragma unroll
          for (int i = 0; i < S::kPer; ++i) {
            const bool has = sees.has(ty() + kSide * i);
            const C score = capped<kHides>(p, rounded_product(s[i][j], scale));
            s[i][j] = has ? exponential(score - lse) : C(0);
            ds[i][j] = has ? s[i][j] * (ds[i][j] - dot) * scale * slope_of_capped<kHides>(p, score) : C(0);
          }
        }
        store_scores<S>(s, weights);
        __syncthreads();
        accumulate_rows<V>(weights, dout_tile, v.width, dv_sums);
        __syncthreads();
        store_scores<S>(ds, weights);
        if (kTakeTurns<S, V>) load_tile<S>(q, b, h, t, d.queries, q_tile);
        __syncthreads();
        accumulate_rows<S>(weights, q_tile, q.width, dk_sums);
      }
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      const int64_t s = key + ty() + kSide * i;
      if (s < d.keys) store_row<S>(dk_sums, i, C(1), dk, b, s, g);
    }
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {  // after those of dk: with both in one loop, registers are spilled
      const int64_t s = key + ty() + kSide * i;
      if (s < d.keys) store_row<V>(dv_sums, i, C(1), dv, b, s, g);
    }
  });
}

}  // namespace

size_t attention_backward_workspace(const View& q) {
  return static_cast<size_t>(q.shape[0] * q.shape[1] * q.shape[2]) * (q.dtype == kF64 ? 8 : 4);
}

void attention_backward(const Stream& stream, const View& q, const View& k, const View& v,
                        const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                        double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace) {
  const char* who = "attention_backward";
  check<ShapeError>(workspace.bytes >= attention_backward_workspace(q), '[', who,
                    "] workspace too small: ", workspace.bytes);
  if (q.dtype == kBF16 || q.dtype == kF16)
    return fragments::attention_backward(stream, q, k, v, out, lse, dout, mask, scale, dq, dk, dv, workspace);
  visit_tiles(who, q, v, [&]<class S, class V>() {
    using C = typename S::C;
    const Problem p = problem_of(q, k, mask, scale);
    const Statistics<C> rows = statistics_of<C>(who, stream, p, out, lse, dout, static_cast<C*>(workspace.data));
    const int64_t query_blocks = blocks_for(p.queries, S::kTile);
    visit_hides(mask, [&]<Hides kHides>() {
      launch(who, stream,
             {.blocks = p.batch * p.heads * query_blocks,
              .threads = kThreads,
              .shared_bytes = 2 * S::kBytes + V::kBytes + S::kScoreBytes},
             attention_dq<S, V, kHides>, p, Heads(q), Heads(k), Heads(v), Heads(dout), Heads(dq), rows, query_blocks,
             Begins(mask));
      launch(who, stream,
             {.blocks = p.batch * p.key_heads * blocks_for(p.keys, S::kTile),
              .threads = kThreads,
              .shared_bytes = 2 * S::kBytes + (kTakeTurns<S, V> ? 1 : 2) * V::kBytes + S::kScoreBytes},
             attention_dkv<S, V, kHides>, p, Heads(q), Heads(k), Heads(v), Heads(dout), Heads(dk), Heads(dv), rows,
             Begins(mask));
    });
  });
}

}  // namespace sheaf::kernels::cuda::blocked
