// Sizes of the delta rule's scratch memory, shared by dispatcher and kernels.
#pragma once

#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/delta_rule.h"

namespace sheaf::kernels::cpu {

/// Rows in scratch are padded to whole lanes.
inline int64_t lane_padded(int64_t width) { return (width + 15) / 16 * 16; }

/// Sizes of one call. A slot, of one thread, computes (sequence, key head) pairs, with all the value heads that read the key head.
struct DeltaRuleSizes {
  int64_t batch, tokens, key_heads, heads, width, value_width;
  explicit DeltaRuleSizes(const DeltaRuleOperands& x)
      : batch(x.q.shape[0]), tokens(x.q.shape[1]), key_heads(x.q.shape[2]), heads(x.v.shape[2]), width(x.q.shape[3]), value_width(x.v.shape[3]) {}

  static constexpr int64_t L = kDeltaChunk;
  int64_t readers() const { return key_heads ? heads / key_heads : 0; }
  int64_t keys() const { return lane_padded(width); }
  int64_t values() const { return lane_padded(value_width); }
  int64_t state() const { return keys() * values(); }
  int64_t chunks() const { return (tokens + L - 1) / L; }
  int64_t items() const { return batch * key_heads; }
  int64_t slots() const { return slot_count(items(), 1); }

  /// Cells of a slot, so that the next begins in a line of its own.
  template <class C>
  static int64_t aligned(int64_t cells) {
    return static_cast<int64_t>(line_align(static_cast<size_t>(cells) * sizeof(C)) / sizeof(C));
  }

  /// Keys, queries, transposed keys, inverse norms, and products of both with keys: see Keys. Then of one value head: see Chunk.
  int64_t keys_cells() const { return 3 * L * keys() + 2 * L + 2 * L * L; }
  int64_t chunk_cells() const { return 3 * L * values() + 2 * L * L + 3 * L; }
  int64_t forward_cells() const { return keys_cells() + chunk_cells() + L * values() + readers() * state(); }
  /// States before chunks, gradients of states, and what the gradient of a chunk needs: see Backward.
  int64_t backward_cells() const {
    return keys_cells() + chunk_cells() + readers() * (chunks() + 2) * state() + 5 * L * values() + 3 * L * keys() + values() * (L + keys()) +
           5 * L * L + 3 * L;
  }
};

}  // namespace sheaf::kernels::cpu
