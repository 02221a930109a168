#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/attention_dots.h"
#include "sheaf/kernels/cuda/attention_fragments.h"

namespace sheaf::kernels::cuda::blocked::fragments {

using namespace attention_tiles;
using namespace attention_tiles::fragments;

namespace {

// As attention_blocked_backward.cu: with p = exp(scale q·k - lse) and ds = p (dout·v - dot) scale, dq = sum of ds k, dk = sum of ds q,
// dv = sum of p dout. p and ds are rounded to T where they are factors.

/// From a score and the product of its value with the output's gradient: p, and ds without the scale, which is applied to sums of ds
/// instead: in f16 less of ds underflows, but it overflows from 65,504 on.
struct Weight {
  float p, ds;
};
/// Turns products of queries and keys into exponents of 2. With a softcap, ds too is the gradient of the products.
template <Hides kHides>
struct ScoreScale {
  float binary;  ///< of products or, with a softcap, of tangents
  float inner;   ///< 0, or the factor of products in the argument of tanh
  __device__ explicit ScoreScale(const Problem& p) {
    const auto scale = static_cast<float>(p.scale), cap = static_cast<float>(p.softcap);
    const bool caps = kHides != Hides::nothing && cap != 0;
    binary = (caps ? cap : scale) * kLog2E, inner = caps ? scale / cap : 0.0f;
  }
  __device__ Weight weight_of(float score, float gradient, float binary_lse, float dot) const {
    float slope = 1.0f;
    if (kHides != Hides::nothing && inner != 0) score = tangent(score * inner), slope = 1.0f - score * score;
    const float p = power_of_2(fused_sum(score, binary, -binary_lse));
    return {p, p * (gradient - dot) * slope};
  }
};

template <class T, int kWidth, int kValueWidth>
struct QueryGradient {
  static constexpr size_t kQueryBytes = Tile<T, kWidth>::bytes(kRows), kOutBytes = Tile<T, kValueWidth>::bytes(kRows),
                          kKeyBytes = Tile<T, kWidth>::bytes(kKeys), kValueBytes = Tile<T, kValueWidth>::bytes(kKeys);
  static constexpr size_t kBytes = kQueryBytes + kOutBytes + 2 * (kKeyBytes + kValueBytes);
  static constexpr int kBlocks = kWidth <= 128 ? 2 : 1;
};

// A block processes kRows queries of a head, a warp 16, and loops over the keys that they see: one tile arrives while the previous
// one is multiplied.
template <class T, int kWidth, int kValueWidth, Hides kHides>
__global__ void __launch_bounds__(kThreads, QueryGradient<T, kWidth, kValueWidth>::kBlocks)
    attention_dq(Problem p, Operand q, Operand k, Operand v, Operand dout, Heads dq, Statistics<float> statistics, int64_t query_blocks,
                 Begins begins) {
  using S = QueryGradient<T, kWidth, kValueWidth>;
  constexpr int kScores = kKeys / 8, kColumns = kWidth / 8;
  char* const memory = dynamic_shared<char>();
  const Tile<T, kWidth> queries{reinterpret_cast<T*>(memory)};
  const Tile<T, kValueWidth> douts{reinterpret_cast<T*>(memory + S::kQueryBytes)};
  const auto keys_in = [&](int turn) {
    return Tile<T, kWidth>{reinterpret_cast<T*>(memory + S::kQueryBytes + S::kOutBytes + turn * (S::kKeyBytes + S::kValueBytes))};
  };
  const auto values_in = [&](int turn) {
    return Tile<T, kValueWidth>{reinterpret_cast<T*>(memory + S::kQueryBytes + S::kOutBytes + turn * (S::kKeyBytes + S::kValueBytes) +
                                                     S::kKeyBytes)};
  };
  const auto scale = static_cast<float>(p.scale);
  const ScoreScale<kHides> of_scores(p);

  const auto [pair, b, h, g, at] = query_block<kRows>(p, query_blocks);
  for_each_tile<kRows, kHides, TilesOf::queries>(
      p, begins, b, at, [&, pair = pair, b = b, h = h, g = g](const Document& d, int64_t first) {
    const int64_t behind = keys_seen<kRows>(p, d, first);
    int64_t key = first_key_seen<kKeys, kHides>(p, d, first);
    const auto load = [&](int64_t from, int turn) {
      if (from < behind) {
        keys_in(turn).template load<kKeys>(k, b, g, from, d.keys);
        values_in(turn).template load<kKeys>(v, b, g, from, d.keys);
      }
      end_round();
    };
    __syncthreads();  // until the previous document's tiles have been read
    queries.template load<kRows>(q, b, h, first, d.queries);
    douts.template load<kRows>(dout, b, h, first, d.queries);
    load(key, 0);
    float binary_lse[2], dot[2];
    int64_t seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t t = first + row_of(i);
      seen[i] = t < d.queries ? d.visible(p, t) : 0;
      binary_lse[i] = seen[i] ? statistics.lse.at(b, h, t) * kLog2E : 0.0f;
      dot[i] = seen[i] ? statistics.dot[pair * p.queries + t] : 0.0f;
    }
    const SixteenRows<T, kWidth, false> own(queries.matrix(), warp_of_thread() * 16);
    const SixteenRows<T, kValueWidth, false> own_dout(douts.matrix(), warp_of_thread() * 16);
    Sums<kColumns> sums = {};
    for (int turn = 0; key < behind; key += kKeys, turn ^= 1) {
      arrived<0>();
      __syncthreads();  // for this turn's, and until those of the turn before have been read
      load(key + kKeys, turn ^ 1);
      Sums<kScores> scores, ds;
      multiply_rows(own, keys_in(turn).matrix(), 0, q.width, scores);
      multiply_rows(own_dout, values_in(turn).matrix(), 0, v.width, ds);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < kScores; ++n)
#pragma unroll
          for (int e = i * 2; e < i * 2 + 2; ++e) ds[n][e] = of_scores.weight_of(scores[n][e], ds[n][e], binary_lse[i], dot[i]).ds;
      if (!all_see_all<kRows, kKeys, kHides>(p, d, first, key))
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const SeenKeys sees = seen_keys<kKeys, kHides>(p, key, seen[i]);
#pragma unroll
          for (int n = 0; n < kScores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!sees.has(column_of(n, e))) ds[n][i * 2 + e] = 0.0f;
        }
      accumulate<T>(ds, keys_in(turn).matrix(), 0, k.width, sums);
    }
    arrived<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (first + row_of(i) < d.queries) store_row<T>(sums, i, scale, dq, b, first + row_of(i), h);
  });
}

enum class Of { keys_and_values, keys, values };

/// With wide heads registers suffice for only one of the two gradients: the scores are computed twice.
template <int kWidth>
inline constexpr bool kApart = kWidth > 192;

template <class T, int kWidth, int kValueWidth>
struct KeyGradient {
  static constexpr int kQueries = kWidth <= 64 ? 64 : 32;  // of a tile
  static constexpr size_t kKeyBytes = Tile<T, kWidth>::bytes(kRows), kValueBytes = Tile<T, kValueWidth>::bytes(kRows),
                          kQueryBytes = Tile<T, kWidth>::bytes(kQueries), kOutBytes = Tile<T, kValueWidth>::bytes(kQueries),
                          kTurnBytes = kQueryBytes + kOutBytes + 2 * kQueries * sizeof(float);
  static constexpr size_t kBytes = kKeyBytes + kValueBytes + 2 * kTurnBytes;
  static constexpr int kBlocks = kWidth <= 128 ? 2 : 1;
};

// A block processes kRows keys of a key head, a warp 16, and loops over the queries that see some of them, for each query head of the
// group. Scores are transposed: a row is a key's.
template <class T, int kWidth, int kValueWidth, Hides kHides, Of kOf>
__global__ void __launch_bounds__(kThreads, KeyGradient<T, kWidth, kValueWidth>::kBlocks)
    attention_dkv(Problem p, Operand q, Operand k, Operand v, Operand dout, Heads dk, Heads dv, Statistics<float> statistics,
                  Begins begins) {
  using S = KeyGradient<T, kWidth, kValueWidth>;
  constexpr int kQueries = S::kQueries, kScores = kQueries / 8;
  constexpr bool kOfKeys = kOf != Of::values, kOfValues = kOf != Of::keys;
  constexpr int kKeyColumns = kOfKeys ? kWidth / 8 : 2, kValueColumns = kOfValues ? kValueWidth / 8 : 2;
  char* const memory = dynamic_shared<char>();
  const Tile<T, kWidth> keys{reinterpret_cast<T*>(memory)};
  const Tile<T, kValueWidth> values{reinterpret_cast<T*>(memory + S::kKeyBytes)};
  struct Turn {
    Tile<T, kWidth> queries;
    Tile<T, kValueWidth> douts;
    float *binary_lse, *dot;
  };
  const auto turn_in = [&](int n) -> Turn {
    char* const at = memory + S::kKeyBytes + S::kValueBytes + n * S::kTurnBytes;
    auto* const statistics_at = reinterpret_cast<float*>(at + S::kQueryBytes + S::kOutBytes);
    return {{reinterpret_cast<T*>(at)}, {reinterpret_cast<T*>(at + S::kQueryBytes)}, statistics_at, statistics_at + kQueries};
  };
  const auto scale = static_cast<float>(p.scale);
  const ScoreScale<kHides> of_scores(p);

  const int64_t pair = blockIdx.x % (p.batch * p.key_heads), b = pair / p.key_heads, g = pair % p.key_heads,
                group = p.heads / p.key_heads;
  const int64_t at = blockIdx.x / (p.batch * p.key_heads) * kRows;
  for_each_tile<kRows, kHides, TilesOf::keys>(p, begins, b, at, [&](const Document& d, int64_t key) {
    int64_t first = d.first_query;  // that sees one of the keys
    if (p.causal && key - p.past() > first) first = key - p.past();
    int64_t behind = d.queries;
    if (kHides != Hides::nothing && p.window) {  // the last that sees the last of the keys
      const int64_t last = key + kRows - 1 + p.window - 1 - p.past();
      if (last + 1 < behind) behind = last + 1;
    }
    const int64_t tiles = behind > first ? blocks_for(behind - first, kQueries) : 0, rounds = tiles * group;

    // Queries of round n: of head h from t on.
    const auto load = [&](int64_t n, int64_t h, int64_t t) {
      if (n < rounds) {
        const Turn to = turn_in(static_cast<int>(n % 2));
        to.queries.template load<kQueries>(q, b, h, t, d.queries);
        to.douts.template load<kQueries>(dout, b, h, t, d.queries);
        if (const int i = static_cast<int>(threadIdx.x); i < kQueries) {
          const bool seen = t + i < d.queries && d.visible(p, t + i) > 0;
          to.binary_lse[i] = seen ? statistics.lse.at(b, h, t + i) * kLog2E : 0.0f;
          to.dot[i] = seen ? statistics.dot[(b * p.heads + h) * p.queries + t + i] : 0.0f;
        }
      }
      end_round();
    };
    __syncthreads();  // until the previous document's tiles have been read
    keys.template load<kRows>(k, b, g, key, d.keys);
    if (kOfKeys) values.template load<kRows>(v, b, g, key, d.keys);
    int64_t h = g * group, t = first;
    load(0, h, t);
    const SixteenRows<T, kWidth, false> own_keys(keys.matrix(), warp_of_thread() * 16);
    const SixteenRows<T, kValueWidth, false> own_values(values.matrix(), warp_of_thread() * 16);
    Sums<kKeyColumns> dk_sums = {};
    Sums<kValueColumns> dv_sums = {};
    for (int64_t n = 0; n < rounds; ++n) {
      const int64_t now = t;
      t += kQueries;
      if (t >= behind) t = first, ++h;
      arrived<0>();
      __syncthreads();  // for this round's, and until those of the round before have been read
      load(n + 1, h, t);
      const Turn turn = turn_in(static_cast<int>(n % 2));
      Sums<kScores> scores, ds;
      multiply_rows(own_keys, turn.queries.matrix(), 0, q.width, scores);
      if constexpr (kOfKeys) multiply_rows(own_values, turn.douts.matrix(), 0, v.width, ds);
#pragma unroll
      for (int m = 0; m < kScores; ++m)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float binary_lse = turn.binary_lse[column_of(m, e)], dot = turn.dot[column_of(m, e)];
#pragma unroll
          for (int i = e; i < 4; i += 2) {
            const Weight weight = of_scores.weight_of(scores[m][i], kOfKeys ? ds[m][i] : 0.0f, binary_lse, dot);
            scores[m][i] = weight.p;
            if constexpr (kOfKeys) ds[m][i] = weight.ds;
          }
        }
      if (!all_see_all<kQueries, kRows, kHides>(p, d, now, key))  // rows of missing queries are zeros, and add nothing
#pragma unroll
        for (int m = 0; m < kScores; ++m)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t query = now + column_of(m, e);
            const SeenKeys sees = seen_keys<kRows, kHides>(p, key, d.visible(p, query));
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (!sees.has(row_of(i))) {
                scores[m][i * 2 + e] = 0.0f;
                if constexpr (kOfKeys) ds[m][i * 2 + e] = 0.0f;
              }
          }
      if constexpr (kOfValues) accumulate<T>(scores, turn.douts.matrix(), 0, v.width, dv_sums);
      if constexpr (kOfKeys) accumulate<T>(ds, turn.queries.matrix(), 0, q.width, dk_sums);
    }
    arrived<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t s = key + row_of(i);
      if (s >= d.keys) continue;
      if constexpr (kOfKeys) store_row<T>(dk_sums, i, scale, dk, b, s, g);
      if constexpr (kOfValues) store_row<T>(dv_sums, i, 1.0f, dv, b, s, g);
    }
  });
}

}  // namespace

void attention_backward(const Stream& stream, const View& q, const View& k, const View& v, const View& out, const View& lse,
                        const View& dout, const AttentionMask& mask, double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace) {
  const char* who = "attention_backward";
  const Problem p = problem_of(q, k, mask, scale);
  const int64_t query_blocks = blocks_for(p.queries, kRows);
  visit_call(who, q, v, [&]<class T, int kWidth, int kValueWidth>() {
    const Statistics<float> statistics = statistics_of<T>(who, stream, p, out, lse, dout, static_cast<float*>(workspace.data));
    visit_hides(mask, [&]<Hides kHides>() {
      launch(who, stream,
             {.blocks = p.batch * p.heads * query_blocks,
              .threads = kThreads,
              .shared_bytes = QueryGradient<T, kWidth, kValueWidth>::kBytes},
             attention_dq<T, kWidth, kValueWidth, kHides>, p, Operand(q), Operand(k), Operand(v), Operand(dout), Heads(dq), statistics,
             query_blocks, Begins(mask));
      const auto of_keys = [&]<Of kOf>() {
        launch(who, stream,
               {.blocks = p.batch * p.key_heads * blocks_for(p.keys, kRows),
                .threads = kThreads,
                .shared_bytes = KeyGradient<T, kWidth, kValueWidth>::kBytes},
               attention_dkv<T, kWidth, kValueWidth, kHides, kOf>, p, Operand(q), Operand(k), Operand(v), Operand(dout), Heads(dk),
               Heads(dv), statistics, Begins(mask));
      };
      if constexpr (kApart<kWidth>) {
        of_keys.template operator()<Of::keys>();
        of_keys.template operator()<Of::values>();
      } else {
        of_keys.template operator()<Of::keys_and_values>();
      }
    });
  });
}

}  // namespace sheaf::kernels::cuda::blocked::fragments
