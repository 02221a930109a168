// TensorRegion: the way into layers whose weights a tensor axis shards, and out of them.
#pragma once

#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/parameter.h"

namespace sheaf::nn {

/// redistribute(x, to). If tokens are sharded that is an all_gather, with a reduce_scatter in the backward; the gathered tokens are
/// not kept for the weights' gradients but gathered again there: else a rank would hold as many of them as without the axis.
/// Integers, a few bytes per token, are kept. `in_pieces`: for a first reader that processes it by rows, as products do, except those
/// in FP8, which would round weights once per piece.
inline Tensor gather_again(const Tensor& x, const Layout& to, bool in_pieces = true) {
  bool gathers = false;
  for (int a = 0; a < to.num_axes(); ++a) gathers = gathers || (x.layout()[a].is_shard() && to[a].is_replicate());
  std::optional<RecomputeScope> again;
  if (gathers && is_floating(x.dtype())) again.emplace(RecomputeOptions{.results = true});
  return in_pieces ? redistribute_in_pieces(x, to) : redistribute(x, to);
}

/// Between enter() and leave() each rank of the tensor axis computes its own heads or hidden units, from all tokens; outside each has
/// its own tokens (Shard along the sequence), or all have all of them. The first layer inside is sharded along its outputs, the last
/// along its inputs, so that its results are addends (Shoeybi et al., https://arxiv.org/abs/1909.08053; Korthikanti et al.,
/// https://arxiv.org/abs/2205.05198). If no tensor axis shards `weight`, both are the identity.
class TensorRegion {
 public:
  /// For the layers that read x, one of which has `weight`.
  TensorRegion(const Tensor& x, const Parameter& weight) : axis_(weight.cut_axis()) {
    if (axis_ >= 0 && x.layout().mesh()) outside_ = x.layout()[axis_];
  }
  /// x on every rank, by gather_again().
  Tensor enter(const Tensor& x, bool in_pieces = true) const {
    return is_cut(x) ? gather_again(x, x.layout().with(axis_, Placement::replicate()), in_pieces) : x;
  }
  /// Where the documents begin of rows that enter(), i32[B, T] placed as x or whole: for attention, which sees whole sequences.
  Tensor enter_begins(const Tensor& begins_BT) const {
    return begins_BT ? whole_sequences(enter(begins_BT, /*in_pieces=*/false)) : begins_BT;
  }
  /// Where the last layer's result goes, for that layer: the sum of the ranks' addends is placed as x was, by a reduce_scatter where
  /// tokens are cut, an all_gather in the backward.
  OutputLayout output_layout() const { return axis_ >= 0 ? along(axis_, outside_) : OutputLayout(); }
  /// The same for the result of any op.
  Tensor leave(const Tensor& y) const { return redistribute_output(y, output_layout()); }
  /// Whether the axis cuts what is inside.
  explicit operator bool() const { return axis_ >= 0; }

 private:
  bool is_cut(const Tensor& t) const { return axis_ >= 0 && t.layout().mesh(); }
  int axis_;
  Placement outside_;
};

}  // namespace sheaf::nn
