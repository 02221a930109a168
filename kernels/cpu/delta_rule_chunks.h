// How the delta rule is divided: sizes, the scratch memory that one slot needs, and which tokens form a chunk; shared by dispatcher
// and kernels.
#pragma once

#include "sheaf/kernels/cpu/head_rows.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/delta_rule.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::cpu {

/// Sizes of one call. An item is a (sequence, key head) pair.
struct DeltaRuleShape {
  int64_t batch, tokens, key_heads, heads, width, value_width;
  explicit DeltaRuleShape(const DeltaRuleOperands& x)
      : batch(x.q.shape[0]),
        tokens(x.q.shape[1]),
        key_heads(x.q.shape[2]),
        heads(x.v.shape[2]),
        width(x.q.shape[3]),
        value_width(x.v.shape[3]) {}

  int64_t group() const { return key_heads ? heads / key_heads : 0; }
  int64_t columns() const { return padded(width); }
  int64_t value_columns() const { return padded(value_width); }
  int64_t state_cells() const { return columns() * value_columns(); }
  int64_t items() const { return batch * key_heads; }
  int64_t slots() const { return slot_count(items(), 1); }

  static constexpr int64_t kSquare = kDeltaChunk * kDeltaChunk;
  /// For a chunk: keys, plain and transposed, queries and their factors; their products, and those with the gates of a head; three
  /// blocks of values; four numbers per token.
  int64_t chunk_cells() const { return kDeltaChunk * (3 * columns() + 3 * value_columns() + 4) + 5 * kSquare; }
  /// In addition, a state for each value head.
  int64_t forward_cells() const { return chunk_cells() + group() * state_cells(); }
  /// In addition, for each value head, two states (one a gradient), the differences of all tokens and the states before chunks; four
  /// more squares and blocks of values, three of keys, a transposed state, and a number per token.
  int64_t backward_cells() const {
    const int64_t chunks = (tokens + kDeltaChunk - 1) / kDeltaChunk;
    return chunk_cells() + group() * ((2 + chunks) * state_cells() + tokens * value_columns()) + 4 * kSquare +
           kDeltaChunk * (4 * value_columns() + 3 * columns() + 1) + state_cells();
  }
};

/// Tokens of one document that are computed together, and whether they are its first or last.
struct Chunk {
  int64_t first, count;
  bool begins, ends;
};

/// The chunks of a sequence. They begin every kDeltaChunk tokens from the first of a document on.
class Chunks {
 public:
  Chunks(const View& begins, int64_t b, int64_t tokens)
      : begins_(given(begins) ? begins.as<int32_t>() + b * begins.strides[0] : nullptr), tokens_(tokens) {}

  /// The one that begins at token t.
  Chunk from(int64_t t) const {
    const int64_t begin = begin_of(t);
    int64_t end = t;
    while (end < tokens_ && end - t < kDeltaChunk && begin_of(end) == begin) ++end;
    return {t, end - t, t == begin, end == tokens_ || begin_of(end) != begin};
  }
  /// The one that ends before token t.
  Chunk before(int64_t t) const { return from(t - 1 - (t - 1 - begin_of(t - 1)) % kDeltaChunk); }

 private:
  int64_t begin_of(int64_t t) const { return begins_ ? std::max(begins_[t], 0) : 0; }

  const int32_t* begins_;
  int64_t tokens_;
};

}  // namespace sheaf::kernels::cpu
