#include "sheaf/kernels/cuda/attention_fragments.h"
#include "sheaf/kernels/cuda/attention_segments.h"

namespace sheaf::kernels::cuda::decode::fragments {

using namespace attention_tiles;
using namespace attention_tiles::fragments;

namespace {

static_assert(kSegmentRows == 16);

template <class T, int kWidth, int kValueWidth>
struct Sizes {
  static constexpr size_t kQueryBytes = Tile<T, kWidth>::bytes(kSegmentRows), kKeyBytes = Tile<T, kWidth>::bytes(kKeys),
                          kValueBytes = Tile<T, kValueWidth>::bytes(kKeys);
  static constexpr size_t kBytes = kQueryBytes + kKeyBytes + kValueBytes + size_t{kSegmentRows} * kKeys * sizeof(float);
  static constexpr int kBlocks = kWidth <= 128 ? 4 : 2;  // per multiprocessor
};

// A block processes the 16 rows of a SegmentBlock. A warp computes a tile's scores for a part of the keys, and a part of the results'
// columns; between the two each warp has all scores and computes the same weights from them as attention_fragments.cu. Values arrive
// while scores are computed, the next keys while values are added.
template <class T, int kWidth, int kValueWidth>
__global__ void __launch_bounds__(kThreads, Sizes<T, kWidth, kValueWidth>::kBlocks)
    segments_kernel(Problem p, Operand q, Operand k, Operand v, Segments to, Begins begins, int64_t tiles) {
  using S = Sizes<T, kWidth, kValueWidth>;
  constexpr int kScores = kKeys / 8, kOwnScores = kScores / kWarps, kOwnColumns = kValueWidth / 8 / kWarps;
  char* const memory = dynamic_shared<char>();
  const Tile<T, kWidth> queries{reinterpret_cast<T*>(memory)}, keys{reinterpret_cast<T*>(memory + S::kQueryBytes)};
  const Tile<T, kValueWidth> values{reinterpret_cast<T*>(memory + S::kQueryBytes + S::kKeyBytes)};
  // The scores of all warps, each in its lanes' layout.
  auto* const all_scores = reinterpret_cast<float4*>(memory + S::kQueryBytes + S::kKeyBytes + S::kValueBytes) + lane_of_thread();
  const int warp = warp_of_thread(), first_column = warp * kOwnColumns * 8;
  const Scale<Hides::something> scale(p);

  const SegmentBlock block(p, to.slots, tiles);
  queries.template load_rows<kSegmentRows>(q.width, q.packed, [&](int row) {
    return row < block.rows ? static_cast<const T*>(q.data) + q.offset(block.b, block.query(row), block.head(row)) : nullptr;
  });
  end_round();
  const SixteenRows<T, kWidth, false> rows(queries.matrix(), 0);
  for_each_part<kKeys>(p, begins, block, to.slots, [&](const SegmentPart& part) {
    const int own[2] = {lane_of_thread() / 4, lane_of_thread() / 4 + 8};
    const SeenKeys sees[2] = {part.seen_by(p, block, own[0]), part.seen_by(p, block, own[1])};
    const int64_t there = part.first + part.there;
    __syncthreads();  // until the previous part's tiles have been read
    keys.template load<kKeys>(k, block.b, block.g, part.first, there);
    end_round();
    Sums<kOwnColumns> sums = {};
    Softmax<float> segment[2];
    for (int key = 0; key < part.count; key += kKeys) {
      arrived<0>();
      __syncthreads();  // for the keys, and until the previous values and scores have been read
      values.template load<kKeys>(v, block.b, block.g, part.first + key, there);
      end_round();
      Sums<kOwnScores> of_warp;
      multiply_rows(rows, keys.matrix(), warp * kOwnScores * 8, q.width, of_warp);
#pragma unroll
      for (int n = 0; n < kOwnScores; ++n)
        all_scores[(warp * kOwnScores + n) * kWarp] = {of_warp[n][0], of_warp[n][1], of_warp[n][2], of_warp[n][3]};
      arrived<0>();
      __syncthreads();  // for the values and the scores, and until the keys have been read
      if (key + kKeys < part.count) keys.template load<kKeys>(k, block.b, block.g, part.first + key + kKeys, there);
      end_round();
      Sums<kScores> scores;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        const float4 four = all_scores[n * kWarp];
        scores[n][0] = four.x, scores[n][1] = four.y, scores[n][2] = four.z, scores[n][3] = four.w;
      }
      scale.prepare(scores);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        hide(scores, i, {sees[i].begin - key, sees[i].behind - key});
        shrink_row(sums, i, add_tile(segment[i], scores, i, scale));
      }
      accumulate<T>(scores, values.matrix(), first_column, v.width, sums);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) close_segment<kSharers>(segment[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (own[i] < part.low || own[i] >= part.high) continue;
      const int64_t slot = to.slot_of(p, block, own[i]);
      if (threadIdx.x < kWarp && lane_of_thread() % kSharers == 0) to.rows[slot] = segment[i];
#pragma unroll
      for (int n = 0; n < kOwnColumns; ++n) {
        const int column = first_column + column_of(n, 0);
        if (column < v.width)
          *reinterpret_cast<float2*>(to.sums + slot * to.width + column) = {sums[n][i * 2], sums[n][i * 2 + 1]};
      }
    }
  });
  arrived<0>();  // if no key is seen
}

}  // namespace

void attention_of_segments(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
                           const Segments& to, int64_t blocks, int64_t tiles) {
  visit_call("attention", q, v, [&]<class T, int kWidth, int kValueWidth>() {
    launch("attention", stream, {.blocks = blocks, .threads = kThreads, .shared_bytes = Sizes<T, kWidth, kValueWidth>::kBytes},
           segments_kernel<T, kWidth, kValueWidth>, problem_of(q, k, mask, scale), Operand(q), Operand(k), Operand(v), to, Begins(mask),
           tiles);
  });
}

}  // namespace sheaf::kernels::cuda::decode::fragments
