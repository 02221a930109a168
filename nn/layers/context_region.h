// ContextRegion: the way into attention where ranks have parts of each sequence, and out of it.
#pragma once

#include <string>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/placement.h"
#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// Outside of enter() and leave() each rank of a context axis has its own tokens of every sequence, inside whole sequences of
/// its own heads: one all_to_all each way, and in the backward (Jacobs et al., https://arxiv.org/abs/2309.14509). Which axes
/// these are, x says: all that cut its sequence. Where none does, both ways are the identity.
class ContextRegion {
 public:
  /// For the x [B, T, E] that enters, features along E cut by `heads` (along dimension 2) inside. What a tensor axis has cut
  /// there is cut further. ConfigError on every rank if one would get nothing.
  ContextRegion(const Tensor& x, const OwnershipMap& heads);
  Tensor enter(const Tensor& x) const { return inside_.mesh() ? redistribute(x, inside_) : x; }
  /// y [B, T, F], of which each rank has the features of its heads.
  Tensor leave(const Tensor& y) const;

  /// ConfigError if key heads, or what else stays together, are too few for the ranks of an axis, cut over the axes `before`.
  static void check_shares(const std::string& path, int64_t units, const MeshSpec& mesh, int axis,
                           const std::vector<int>& before);

 private:
  Layout outside_, inside_;  // without a mesh: there is nothing to do
};

}  // namespace sheaf::nn
