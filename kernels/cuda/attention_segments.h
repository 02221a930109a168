// Attention of few queries to many keys: what the kernels that process one segment per block (attention_decode.cu,
// attention_decode_fragments.cu) share.
#pragma once

#include "sheaf/kernels/cuda/attention_rows.h"

namespace sheaf::kernels::cuda::attention_tiles {

/// Rows of a block: queries of the heads that share a key head.
inline constexpr int kSegmentRows = 16;

/// A block's work: up to kSegmentRows of a key head's T H / G rows (query t of its head n is row t H / G + n), and one segment of
/// their keys, whose result is stored in `slot`. A key head's rows are divided into `tiles`.
struct SegmentBlock {
  int64_t slot, b, g;
  int group, first_row, rows;

  __device__ SegmentBlock(const Problem& p, int slots, int64_t tiles) {
    const int64_t block = blockIdx.x / slots, pair = block / tiles;
    slot = blockIdx.x % slots, b = pair / p.key_heads, g = pair % p.key_heads;
    group = static_cast<int>(p.heads / p.key_heads), first_row = static_cast<int>(block % tiles) * kSegmentRows;
    const int left = static_cast<int>(p.queries) * group - first_row;
    rows = left < kSegmentRows ? left : kSegmentRows;
  }
  __device__ int64_t query(int row) const { return (first_row + row) / group; }
  __device__ int64_t head(int row) const { return g * group + (first_row + row) % group; }
};

/// The results of each query's segments: segment c is in slot c % slots.
struct Segments {
  float* sums;           ///< [B, H, T, slots, width]
  Softmax<float>* rows;  ///< [B, H, T, slots]
  int slots, width;      ///< width: that of values, rounded up to a multiple of 4

  __device__ int64_t first_slot(const Problem& p, int64_t b, int64_t h, int64_t t) const {
    return ((b * p.heads + h) * p.queries + t) * slots;
  }
  __device__ int64_t slot_of(const Problem& p, const SegmentBlock& block, int row) const {
    return first_slot(p, block.b, block.head(row), block.query(row)) + block.slot;
  }
};

/// The most consecutive segments of which the queries of a block may see any key.
inline int64_t slots_of(const Problem& p) {
  const int64_t all = std::max<int64_t>(blocks_for(p.keys, kSegment), 1);
  if (p.window == 0) return all;
  const int64_t queries = std::min<int64_t>(p.queries, kSegmentRows);
  return std::min(all, blocks_for(p.window + queries - 1, kSegment) + 1);
}

/// The first segment of a document that a query sees, and the end of the segments it sees.
struct SeenSegments {
  int64_t first, behind;
};
__device__ inline SeenSegments segments_seen(const Problem& p, const Document& d, int64_t t) {
  const int64_t seen = d.visible(p, t) - d.first_key, hidden = p.window ? seen - p.window : 0;
  return {hidden > 0 ? hidden / kSegment : 0, seen > 0 ? blocks_for(seen, kSegment) : 0};
}

__device__ inline Document document_of(const Problem& p, const Begins& begins, int64_t b, int64_t t) {
  return begins.data ? begins.of_query(p, b, t) : Document{0, p.queries, 0, p.keys};
}

/// Keys of a segment that rows [low, high) of a block, those of one document, see: some of the `count` from key `first` on; `there`
/// keys from `first` on belong to the document.
struct SegmentPart {
  int64_t first;
  int low, high, count, there;

  /// The keys that a row sees, numbered from `first`; none if it belongs to another document.
  __device__ SeenKeys seen_by(const Problem& p, const SegmentBlock& block, int row) const {
    const int64_t visible = row >= low && row < high ? p.visible(block.query(row)) : 0;
    const auto from_first = [&](int64_t key) { return static_cast<int>(std::clamp<int64_t>(key - first, 0, kSegment)); };
    return {p.window ? from_first(visible - p.window) : 0, std::min(from_first(visible), there)};
  }
};

/// Calls f(part) for the documents of the block's rows, one after another: for its segment of each that has one. Tiles begin at the same
/// keys as without a window.
template <int kTile, class F>
__device__ void for_each_part(const Problem& p, const Begins& begins, const SegmentBlock& block, int slots, F&& f) {
  const int64_t queries_behind = block.query(block.rows - 1) + 1;
  for (int64_t t = block.query(0), behind = t; t < queries_behind; t = behind) {
    const Document d = document_of(p, begins, block.b, t);
    behind = std::min(d.queries, queries_behind);
    // This block's segment among those that they see, which begin with number `seen`.
    const int64_t seen = segments_seen(p, d, t).first, c = seen + (block.slot - seen % slots + slots) % slots,
                  begin = d.first_key + c * kSegment, end = std::min(begin + kSegment, d.visible(p, behind - 1));
    if (begin >= end) continue;
    const int64_t hidden = p.window ? p.visible(t) - p.window - begin : 0, first = hidden > 0 ? begin + hidden / kTile * kTile : begin;
    const auto row_of = [&](int64_t query) { return query * block.group - block.first_row; };
    f(SegmentPart{first, static_cast<int>(std::max<int64_t>(row_of(t), 0)), static_cast<int>(std::min<int64_t>(row_of(behind), block.rows)),
                  static_cast<int>(end - first), static_cast<int>(std::min<int64_t>(d.keys - first, kSegment))});
  }
}

}  // namespace sheaf::kernels::cuda::attention_tiles

namespace sheaf::kernels::cuda::decode::fragments {

/// Segments of bf16 and f16, by tensor cores. `blocks` in total; each key head has `tiles` of them for each slot.
void attention_of_segments(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
                           const attention_tiles::Segments& to, int64_t blocks, int64_t tiles);

}  // namespace sheaf::kernels::cuda::decode::fragments
