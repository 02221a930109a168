#include "sheaf/kernels/cuda/attention_fragments.h"
#include "sheaf/kernels/cuda/attention_blocked.h"

namespace sheaf::kernels::cuda::blocked::fragments {

using namespace attention_tiles;
using namespace attention_tiles::fragments;

namespace {

// A block processes kRows queries of a head, a warp 16 of them, and loops over the keys that they see as in attention_blocked.cu.
// Values and the next keys arrive while scores and weights are computed. Sums of the segments so far are in shared memory, each
// thread's its own: there are not enough registers for them in addition to those of the current segment.
template <class T, int kWidth, int kValueWidth>
struct Forward {
  static constexpr int kColumns = kValueWidth / 8;
  static constexpr size_t kQueryBytes = Tile<T, kWidth>::bytes(kRows), kKeyBytes = Tile<T, kWidth>::bytes(kKeys),
                          kValueBytes = Tile<T, kValueWidth>::bytes(kKeys);
  static constexpr size_t kBytes = kQueryBytes + 2 * kKeyBytes + kValueBytes + size_t{kRows} * kValueWidth * sizeof(float);
  static constexpr int kBlocks = kWidth <= 64 ? 3 : kWidth <= 128 ? 2 : 1;  // per multiprocessor
};

template <class T, int kWidth, int kValueWidth, Hides kHides>
__global__ void __launch_bounds__(kThreads, Forward<T, kWidth, kValueWidth>::kBlocks)
    attention_forward(Problem p, Operand q, Operand k, Operand v, Heads out, PerQuery<float> lse, int64_t query_blocks, Begins begins) {
  using S = Forward<T, kWidth, kValueWidth>;
  constexpr int kScores = kKeys / 8, kColumns = S::kColumns;
  char* const memory = dynamic_shared<char>();
  const Tile<T, kWidth> queries{reinterpret_cast<T*>(memory)};
  const auto keys_in = [&](int turn) { return Tile<T, kWidth>{reinterpret_cast<T*>(memory + S::kQueryBytes + turn * S::kKeyBytes)}; };
  const Tile<T, kValueWidth> values{reinterpret_cast<T*>(memory + S::kQueryBytes + 2 * S::kKeyBytes)};
  auto* const so_far = reinterpret_cast<float4*>(memory + S::kQueryBytes + 2 * S::kKeyBytes + S::kValueBytes) + threadIdx.x;
  const Scale<kHides> scale(p);

  const auto [pair, b, h, g, at] = query_block<kRows>(p, query_blocks);
  for_each_tile<kRows, kHides, TilesOf::queries>(p, begins, b, at, [&, b = b, h = h, g = g](const Document& d, int64_t first) {
    const int64_t behind = keys_seen<kRows>(p, d, first);
    int64_t key = first_key_seen<kKeys, kHides>(p, d, first);
    __syncthreads();  // until the previous document's queries have been read
    queries.template load<kRows>(q, b, h, first, d.queries);
    if (key < behind) keys_in(0).template load<kKeys>(k, b, g, key, d.keys);
    end_round();
    Softmax<float> rows[2];
    int64_t seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) seen[i] = d.visible(p, first + row_of(i));
#pragma unroll
    for (int n = 0; n < kColumns; ++n) so_far[n * kThreads] = {};
    SixteenRows<T, kWidth, kWidth <= 128> own(queries.matrix(), warp_of_thread() * 16);
    arrived<0>();
    __syncthreads();
    own.read(q.width);

    int turn = 0;
    while (key < behind) {
      const int64_t segment_end = segment_behind(d, key), end = segment_end < behind ? segment_end : behind;
      Sums<kColumns> sums = {};
      Softmax<float> segment[2];
      for (; key < end; key += kKeys, turn ^= 1) {
        arrived<0>();
        __syncthreads();  // for the keys, and until the previous keys and values have been read
        values.template load<kKeys>(v, b, g, key, d.keys);
        end_round();
        if (key + kKeys < behind) keys_in(turn ^ 1).template load<kKeys>(k, b, g, key + kKeys, d.keys);
        end_round();
        Sums<kScores> scores;
        multiply_rows(own, keys_in(turn).matrix(), 0, q.width, scores);
        scale.prepare(scores);
        if (!all_see_all<kRows, kKeys, kHides>(p, d, first, key))
#pragma unroll
          for (int i = 0; i < 2; ++i) hide(scores, i, seen_keys<kKeys, kHides>(p, key, seen[i]));
#pragma unroll
        for (int i = 0; i < 2; ++i) shrink_row(sums, i, add_tile(segment[i], scores, i, scale));
        arrived<1>();
        __syncthreads();  // for the values
        accumulate<T>(scores, values.matrix(), 0, v.width, sums);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) close_segment<kSharers>(segment[i]);
      const Shares<float> shares[2] = {add_segment(rows[0], segment[0]), add_segment(rows[1], segment[1])};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float4& to = so_far[n * kThreads];
        to = {shares[0].sum(to.x, sums[n][0]), shares[0].sum(to.y, sums[n][1]), shares[1].sum(to.z, sums[n][2]),
              shares[1].sum(to.w, sums[n][3])};
      }
    }
    arrived<0>();  // of a round without copies
    Sums<kColumns> sums;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float4 all = so_far[n * kThreads];
      sums[n][0] = all.x, sums[n][1] = all.y, sums[n][2] = all.z, sums[n][3] = all.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t t = first + row_of(i);
      if (t >= d.queries) continue;
      const Ending<float> ending = ending_of(rows[i]);
      store_row<T>(sums, i, ending.scale, out, b, t, h);
      if (lane_of_thread() % kSharers == 0) lse.at(b, h, t) = ending.lse;
    }
  });
}

}  // namespace

void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
               const View& out, const View& lse) {
  const Problem p = problem_of(q, k, mask, scale);
  const int64_t query_blocks = blocks_for(p.queries, kRows);
  visit_call("attention", q, v, [&]<class T, int kWidth, int kValueWidth>() {
    visit_hides(mask, [&]<Hides kHides>() {
      launch("attention", stream,
             {.blocks = p.batch * p.heads * query_blocks, .threads = kThreads, .shared_bytes = Forward<T, kWidth, kValueWidth>::kBytes},
             attention_forward<T, kWidth, kValueWidth, kHides>, p, Operand(q), Operand(k), Operand(v), Heads(out), PerQuery<float>(lse),
             query_blocks, Begins(mask));
    });
  });
}

}  // namespace sheaf::kernels::cuda::blocked::fragments
