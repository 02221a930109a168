#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/attention_tiles.h"

namespace sheaf::kernels::cuda::blocked {

using namespace attention_tiles;

namespace {

// A block processes kTile queries of a head and loops over the keys that the last of them sees, a tile at a time (FlashAttention-2's
// loop order), by segments (attention_softmax.h). Keys past those that a query sees have probability zero, so its result does not
// depend on the other queries of the block; so have those before a window, and tiles of only such keys are skipped. With documents it
// processes the tiles of documents that begin within its kTile queries, one after another.
template <class S, class V, Hides kHides>
__global__ void __launch_bounds__(kThreads, S::kWidth <= 64 ? 2 : 1)
    attention_forward(Problem p, Heads q, Heads k, Heads v, Heads out,
                      PerQuery<typename S::C> lse, int64_t query_blocks, Begins begins) {
  using C = typename S::C;
  C* q_tile = dynamic_shared<C>();
  C* tile = q_tile + S::kBytes / sizeof(C);  // of keys, then of values, which need no more
  C* weights = tile + S::kBytes / sizeof(C);

  const auto [pair, b, h, g, at] = query_block<S::kTile>(p, query_blocks);
  for_each_tile<S::kTile, kHides, TilesOf::queries>(p, begins, b, at, [&, b = b, h = h, g = g](const Document& d, int64_t first) {
    const int64_t keys = keys_seen<S::kTile>(p, d, first);
    typename V::Results sums = {};
    Softmax<C> rows[S::kPer];
    int64_t seen[S::kPer];
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      const int64_t t = first + ty() + kSide * i;
      seen[i] = t < d.queries ? d.visible(p, t) : 0;
    }
    load_tile<S>(q, b, h, first, d.queries, q_tile);
    for (int64_t key = first_key_seen<S::kTile, kHides>(p, d, first); key < keys;) {
      const int64_t behind = segment_behind(d, key), end = behind < keys ? behind : keys;
      typename V::Results of_segment = {};
      Softmax<C> segment[S::kPer];
      for (; key < end; key += S::kTile) {
        __syncthreads();
        load_tile<S>(k, b, g, key, d.keys, tile);
        __syncthreads();
        typename S::Scores s;
        multiply_rows<S>(q_tile, tile, q.width, s);
#pragma unroll
        for (int i = 0; i < S::kPer; ++i) {
          const SeenKeys sees = seen_keys<S::kTile, kHides>(p, key, seen[i]);
#pragma unroll
          for (int j = 0; j < S::kPer; ++j)
            s[i][j] = sees.has(tx() + kSide * j)
                          ? capped<kHides>(p, rounded_product(s[i][j], static_cast<C>(p.scale)))
                          : kHidden<C>;
          const C shrink = add_tile(segment[i], s[i]);
#pragma unroll
          for (int c = 0; c < V::kChunks; ++c)
#pragma unroll
            for (int e = 0; e < V::kVec; ++e)
              of_segment[i][c][e] = rounded_product(of_segment[i][c][e], shrink);
        }
        store_scores<S>(s, weights);
        __syncthreads();
        load_tile<V>(v, b, g, key, d.keys, tile);
        __syncthreads();
        accumulate_rows<V>(weights, tile, v.width, of_segment);
      }
#pragma unroll
      for (int i = 0; i < S::kPer; ++i) {
        close_segment<kSide>(segment[i]);
        const Shares<C> shares = add_segment(rows[i], segment[i]);
#pragma unroll
        for (int c = 0; c < V::kChunks; ++c)
#pragma unroll
          for (int e = 0; e < V::kVec; ++e)
            sums[i][c][e] = shares.sum(sums[i][c][e], of_segment[i][c][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kPer; ++i) {
      const int64_t t = first + ty() + kSide * i;
      if (t >= d.queries) continue;
      const Ending<C> ending = ending_of(rows[i]);
      store_row<V>(sums, i, ending.scale, out, b, t, h);
      if (tx() == 0) lse.at(b, h, t) = ending.lse;
    }
  });
}

}  // namespace

void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask,
               double scale, const View& out, const View& lse) {
  if (q.dtype == kBF16 || q.dtype == kF16) return fragments::attention(stream, q, k, v, mask, scale, out, lse);
  visit_tiles("attention", q, v, [&]<class S, class V>() {
    const Problem p = problem_of(q, k, mask, scale);
    const int64_t query_blocks = blocks_for(p.queries, S::kTile);
    visit_hides(mask, [&]<Hides kHides>() {
      launch("attention", stream,
             {.blocks = p.batch * p.heads * query_blocks,
              .threads = kThreads,
              .shared_bytes = 2 * S::kBytes + S::kScoreBytes},
             attention_forward<S, V, kHides>, p, Heads(q), Heads(k), Heads(v), Heads(out),
             PerQuery<typename S::C>(lse), query_blocks, Begins(mask));
    });
  });
}

}  // namespace sheaf::kernels::cuda::blocked
