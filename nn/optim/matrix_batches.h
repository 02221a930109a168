// Where matrices lie on their way to being orthogonalised: in a flat shard, whole on a rank, in batches of equal shape.
//
// [Note: matrices on one rank] Units cut their parameters anywhere, and an orthogonal factor takes a whole matrix. What is
// needed in between are redistributions, nodes of the tape like any other. Of the matrices of a flat buffer (Bundle):
//
//   at rest   [n]         Shard(0 uneven)@axis          as the shard has them, side by side
//   owned     [n]         Shard(0 owned)@axis           every matrix whole on one rank
//
// and of those of equal shape, of many units (Batch):
//
//   stacked   [k, M, N]   Shard(0 uneven)@axis          each rank's own, one after another: a copy, nothing is sent
//   shared    [k, M, N]   and Shard(0 inner)@others     those that replicas share out, too: a slice, and all_gathered after
//
// With a secondary axis a rank has a part of what its group would have: [ranks, n], Shard(0)@axis Shard(1)@secondary, where n is
// the size of the largest part; it is gathered along that axis first and joined, [n]. Where a tensor axis cuts matrices, a rank
// has blocks, [ranks, n] with Shard(0)@tensor throughout, and stacks [ranks, k, room]: what shares out k then puts the blocks of a
// matrix on one rank (an all_to_all, from Shard(0) to Shard(1 inner)), where they are put together. In a pipeline each stage does
// all that with its own matrices: everywhere, Shard(on it)@stages.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::optim {

/// A table that attributes of ops point to: interned.
using Table = const std::vector<int64_t>*;

/// What is orthogonalised by itself: a parameter, or a part of one that its cut names (nn::Parameter::set_cut).
struct MatrixPart {
  int64_t rows, cols;
  OwnershipMap cut;                 ///< by the tensor axis, if one cuts the parameter
  int64_t begin, stride;            ///< of this rank's block inside of the parameter's: its first element, and the distance from row to row
};

/// A parameter. All of it is sent to one rank.
struct Matrix {
  int leaf;                         ///< of its unit
  std::vector<MatrixPart> parts;
  int64_t room;                     ///< elements: of the largest block that a rank of the tensor axis has
  int owner = 0;                    ///< the rank, of the axis that shares the work
  /// Multiplications of an iteration, up to a factor common to all.
  int64_t cost() const;
};

/// A stage of a pipeline: only its ranks have these matrices, and orthogonalise them.
struct Stage {
  int axis = -1;  ///< of the mesh; -1: they are in none
  int index = 0;
  bool operator==(const Stage&) const = default;
};

/// Some parameters of a flat buffer, one after another: all that are matrices, or all others.
struct Bundle {
  std::vector<Matrix> matrices;     ///< empty for others
  int axis = -1;                    ///< of the mesh, that shares the work; -1 without a mesh
  int tensor_axis = -1;             ///< that cuts these
  Stage stage = {};
  Type at_rest, joined, owned;      ///< of all elements, in the masters' dtype
  Table parts = nullptr;            ///< pieces: where in the shard, where in what is at rest, elements
  Table slices = nullptr;           ///< of the ranks of a secondary axis: elements; null without one
  int64_t before = 0;               ///< elements of the slices before this rank's
  Tensor whole;                     ///< of matrices: the shard's segments with learning rates of 1, which are the momentum's
};

/// The bundle of these leaves of a shard; fills in `shard.parts`, counted in what is at rest.
Bundle make_bundle(const ShardState& all, std::vector<Matrix> matrices, ShardState& shard);

/// The matrix, or matrices, that a parameter of `unit` is. ConfigError if it does not have two dimensions.
Matrix matrix_of(const nn::Parameter& p);

/// Gives each matrix an owner, and each bundle its type `owned`. Owners follow from shapes alone: each matrix, the costliest
/// first, goes to the rank with the least to do so far, over all bundles.
void choose_owners(std::span<Bundle> bundles);

/// Matrices of equal shape and kind.
struct Batch {
  int64_t rows, cols;
  std::vector<int> bundles = {};    ///< that they come from
  Type stacked = {}, shared = {};
  Type matrices = {};               ///< what is shared, [k, M, N]: the same if no tensor axis cuts them
  std::optional<OwnershipMap> cut = {};  ///< by a tensor axis
  Table own = nullptr;              ///< this rank's, in order: which of `bundles`, first element, rows, columns, row stride
};

/// All matrices of these bundles, which are indices into `all`, in batches. A rank's work on a batch is bounded
/// (kBatch), and so is its memory.
std::vector<Batch> batches_of(std::span<const Bundle> all, const std::vector<int>& bundles);

}  // namespace sheaf::optim
