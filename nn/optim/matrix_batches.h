// Where matrices are while they are orthogonalised: in a flat shard, whole on a rank, in batches of equal shape.
//
// [Note: matrices on one rank] Units shard their parameters anywhere, and an orthogonal factor needs a whole matrix. In between are
// ordinary redistributions, nodes of the tape. For the matrices of a flat buffer (Bundle):
//
//   at rest   [n]         Shard(0 uneven)@axis          in the shard's order, one after another
//   owned     [n]         Shard(0 owned)@axis           every matrix whole on one rank
//
// and for those of equal shape, of many units (Batch):
//
//   stacked   [k, M, N]   Shard(0 uneven)@axis          each rank's own, one after another: a copy, nothing is sent
//   shared    [k, M, N]   and Shard(0 inner)@others     those distributed over replicas, too: a slice, and all_gathered after
//
// With a secondary axis a rank has a part of its group's slice: [ranks, n], Shard(0)@axis Shard(1)@secondary, where n is the size of
// the largest part; it is gathered along that axis first and joined, [n]. If a tensor axis shards matrices, a rank has blocks,
// [ranks, n] with Shard(0)@tensor throughout, and stacks [ranks, k, room]: the step that shares out k then collects the blocks of a
// matrix on one rank (an all_to_all, from Shard(0) to Shard(1 inner)), where they are assembled. In a pipeline each stage does all
// that with its own matrices: all values are Shard(on it)@stages.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::optim {

/// A table that attributes of ops point to: interned.
using Table = const std::vector<int64_t>*;

/// The unit of orthogonalisation: a parameter, or a part of one that its cut names (nn::Parameter::set_cut).
struct MatrixPart {
  int64_t rows, cols;
  OwnershipMap cut;       ///< by the tensor axis, if one shards the parameter
  int64_t begin, stride;  ///< of this rank's block within the parameter's: its first element, and the row stride
};

/// A parameter. All of it is sent to one rank.
struct Matrix {
  int leaf;  ///< index in its unit
  std::vector<MatrixPart> parts;
  int64_t room;   ///< elements: of the largest block of a rank of the tensor axis
  int owner = 0;  ///< the rank that orthogonalises it, on the axis that shares the work
  /// Multiplications per iteration, up to a factor common to all.
  int64_t cost() const;
};

/// A pipeline stage: only its ranks have these matrices, and orthogonalise them.
struct Stage {
  int axis = -1;  ///< of the mesh; -1: no stage
  int index = 0;
  bool operator==(const Stage&) const = default;
};

/// Some parameters of a flat buffer, one after another: all its matrices, or all others.
struct Bundle {
  std::vector<Matrix> matrices;  ///< empty for others
  int axis = -1;                 ///< of the mesh, that shares the work; -1 without a mesh
  int tensor_axis = -1;          ///< the one that shards these
  Stage stage = {};
  Type at_rest, joined, owned;  ///< of all elements, in the masters' dtype
  Table parts = nullptr;        ///< pieces: offset in the shard, offset in `at_rest`, elements
  Table slices = nullptr;       ///< of the ranks of a secondary axis: elements; null without one
  int64_t before = 0;           ///< elements of the slices that precede this rank's
  Tensor whole;                 ///< for matrices: the shard's segments with learning rates of 1, which are the momentum's
};

/// The bundle of these leaves of a shard; fills in `shard.parts`, with offsets in `at_rest`.
Bundle make_bundle(const ShardState& all, std::vector<Matrix> matrices, ShardState& shard);

/// The matrix, or matrices, of a parameter of `unit`. ConfigError if it does not have two dimensions.
Matrix matrix_of(const nn::Parameter& p);

/// Gives each matrix an owner, and each bundle its type `owned`. Owners depend on shapes alone: each matrix, the costliest first, is
/// assigned to the rank with the least work so far, over all bundles.
void choose_owners(std::span<Bundle> bundles);

/// Matrices of equal shape and kind.
struct Batch {
  int64_t rows, cols;
  std::vector<int> bundles = {};  ///< that they come from
  Type stacked = {}, shared = {};
  Type matrices = {};                    ///< what is distributed, [k, M, N]: the same if no tensor axis shards them
  std::optional<OwnershipMap> cut = {};  ///< by a tensor axis
  Table own = nullptr;                   ///< this rank's, in order: index into `bundles`, first element, rows, columns, row stride
};

/// All matrices of these bundles, which are indices into `all`, in batches. A rank's work on a batch is bounded
/// (kBatch), and so is its memory.
std::vector<Batch> batches_of(std::span<const Bundle> all, const std::vector<int>& bundles);

}  // namespace sheaf::optim
