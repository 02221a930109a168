// Attention with sharded sequences: how they are sharded, what is sent, and ContextRegion, which enters and leaves that sharding.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/placement.h"
#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// x[B, T, ..] with whole sequences on every rank of the axes that shard them.
Tensor whole_sequences(const Tensor& x);
/// The same for keys and values [B, T, 2 G, D], each read by `readers` query heads in attention: see
/// redistribute_in_heads().
Tensor whole_keys_values(const Tensor& x, int64_t readers);

/// How the ranks of a context axis communicate in attention.
enum class ContextComm {
  all_to_all,  ///< queries, keys, values and results: each rank has whole sequences of some heads (ContextRegion). At most as many ranks as
               ///< heads
  all_gather,  ///< keys and values, gathered again in the backward: each rank has its own queries of all heads. Any number of ranks; a
               ///< causal mask's work is balanced if tokens are Shard(OwnershipMap::from_both_ends())
};
/// "all_to_all" or "all_gather"; ConfigError for others.
ContextComm context_comm_from(std::string_view name);

/// Outside of enter() and leave() each rank of a context axis has its own tokens of every sequence, inside it has whole sequences of
/// its own heads: one all_to_all each way, and in the backward (Jacobs et al., https://arxiv.org/abs/2309.14509). The axes are all
/// those that shard the sequence of x. If there is none, both are the identity.
class ContextRegion {
 public:
  ContextRegion() = default;  ///< enter() and leave() are the identity
  explicit operator bool() const { return inside_.mesh(); }  ///< whether they are not
  /// For an entering x [B, T, E] of this type, whose features E are sharded by `heads` (along dimension 2) inside. Features that a
  /// tensor axis has already sharded are sharded further. ConfigError on every rank if one would get nothing.
  ContextRegion(const Type& x, const OwnershipMap& heads);
  ContextRegion(const Tensor& x, const OwnershipMap& heads) : ContextRegion(x.type(), heads) {}
  Tensor enter(const Tensor& x) const { return inside_.mesh() ? redistribute(x, inside_) : x; }
  /// For the product that makes x, which then enters in pieces: *this becomes the region of x. The result must not outlive
  /// *this.
  OutputLayout output_layout(const OwnershipMap& heads);
  /// Takes y [B, T, F], where each rank has its heads' features. `in_pieces`: for a first reader that takes it by rows, as products do.
  Tensor leave(const Tensor& y, bool in_pieces = true) const;

  /// How often each of the `units` (key heads, or other indivisible groups), already sharded by the axes `before`, is copied so that
  /// all ranks of `axes` have some: the smallest divisor of `most` that gives every rank one. ConfigError if none does.
  static int64_t copies(const std::string& path, int64_t units, int64_t most, const MeshSpec& mesh, const std::vector<int>& axes,
                        const std::vector<int>& before);
  /// The same for an x that is to enter: `axes` shard its sequence, and `before` its features along dimension 2.
  static int64_t copies(const Type& x, int64_t units, int64_t most);

 private:
  Layout outside_, inside_;  // without a mesh: nothing to do
};

}  // namespace sheaf::nn
