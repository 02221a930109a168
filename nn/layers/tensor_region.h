// TensorRegion: the way into layers whose weights a tensor axis cuts, and out of them.
#pragma once

#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/parameter.h"

namespace sheaf::nn {

/// Between enter() and leave() each rank of the tensor axis computes its own heads or hidden units, from all tokens; outside
/// each has its own tokens (Shard along the sequence), or all have all of them. The first layer inside is cut along its
/// outputs, the last along its inputs, so that it puts out addends (Shoeybi et al., https://arxiv.org/abs/1909.08053;
/// Korthikanti et al., https://arxiv.org/abs/2205.05198). Where no tensor axis cuts `weight`, both ways are the identity.
class TensorRegion {
 public:
  /// For the layers behind x, of which one has `weight`.
  TensorRegion(const Tensor& x, const Parameter& weight) : axis_(weight.cut_axis()) {
    if (axis_ >= 0 && x.layout().mesh()) outside_ = x.layout()[axis_];
  }
  /// x on every rank: an all_gather where tokens are cut, which is a reduce_scatter in the backward. All tokens are not kept
  /// for the weights' gradients but gathered again there: else a rank would hold as much of them as without the axis.
  /// Integers, a few bytes a token, are kept.
  Tensor enter(const Tensor& x) const {
    std::optional<RecomputeScope> again;
    if (outside_.is_shard() && is_floating(x.dtype())) again.emplace(RecomputeOptions{.results = true});
    return to(x, Placement::replicate());
  }
  /// The sum of the ranks' addends, placed as x was: a reduce_scatter where tokens are cut, an all_gather in the backward.
  Tensor leave(const Tensor& y) const { return to(y, outside_); }

 private:
  Tensor to(const Tensor& t, const Placement& p) const {
    return axis_ >= 0 && t.layout().mesh() ? redistribute(t, t.layout().with(axis_, p)) : t;
  }
  int axis_;
  Placement outside_;
};

}  // namespace sheaf::nn
