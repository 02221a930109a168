// DiLoCo: islands of ranks that each train a model, and synchronize them occasionally.
//
//   const Mesh all = world.mesh({{"island", 2}, {"data", 4}}), mesh = world.slice(all, "island");
//   shard(model, mesh, ...);             // nothing of a step crosses islands
//   materialize(model, world.device());  // the same values on all islands
//   optim::AdamW inner(model);
//   optim::DiLoCo outer(model, all, "island");
//   ...
//   if ((step + 1) % 100 == 0) outer.step();  // after inner.step(); steps count from 0
//
// [Note: islands] Between two outer steps a parameter has a value on each island, so for all ranks together it is a tensor with one
// more dimension, a row for each island: Shard(0) along the axis of the islands. An outer step is then a mean over that dimension
// between ordinary redistributions, for each unit:
//
//   rows        [islands, R, n]  Shard(0)@island     the masters: R ranks of an island that hold different elements
//   all_to_all                   Shard(2)@island     each island has all rows of a part
//   mean        [R, n]           Shard(1)@island     in the order of the islands: a reduce_scatter would send no less
//   step        parameters       the same            SGD whose gradient is how far they have moved
//   all_gather                   Replicate@island    and back into each row
//
// So all islands, and replicas within them, have the same bits, and the outer optimizer's two tensors, the parameters of the last
// outer step and their momentum, are sharded over all ranks: each takes the bytes of masters / islands. Every `inner` steps an island
// receives the bytes of its masters twice.
//
// [Note: moves in fewer bits] Parameters must not be rounded, but how far they have moved, and will move, may be: to bf16, or to int8
// blocks (kernels/quantize.h):
//
//   moves       [islands, R, n]  Shard(0)@island     rows minus the parameters of the last outer step, in fewer bits
//   all_to_all                   Shard(2)@island
//   mean        [R, n]           Shard(1)@island     in the masters' dtype; then the step, which gives a move, in fewer bits
//   all_gather                   Replicate@island    added to the parameters of the last outer step, which gives the rows
//
// All islands add the same bits to the same values. For that each has all parameters of the last outer step, sharded over its own
// ranks.
#pragma once

#include "sheaf/distributed/device_mesh.h"
#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::optim {

/// The data that islands exchange.
enum class Moves : uint8_t {
  whole,  ///< parameters, in the masters' dtype
  bf16,   ///< how far they have moved: half of the bytes
  int8,   ///< in blocks of 64 with a scale, rounded stochastically: a quarter; of units with ShardOptions::whole_blocks
};
/// By its name, "f32" for whole; ConfigError for others.
Moves moves_from(std::string_view name);

struct DiLoCoOptions {
  double lr = 0.7;        ///< of the outer step; 1 without momentum: parameters become their mean (local SGD, FedAvg)
  double momentum = 0.9;  ///< Nesterov's, in [0, 1)
  Moves moves = Moves::whole;
  bool offload = false;  ///< on a GPU the momentum is kept in host memory
};

/// A tensor of the outer optimizer, and which parts of which parameters this rank has in it.
struct OuterState {
  Tensor tensor;
  std::vector<StatePart> parts;
};

/// A flat buffer of a unit, as the outer optimizer sees it.
struct OuterShard {
  std::shared_ptr<Unit> unit;
  size_t buffer;        ///< index into unit->buffers()
  Tensor rows;          ///< its masters, by island
  OuterState values;    ///< parameters after the last outer step
  OuterState momentum;  ///< undefined without momentum, and for parameters that no optimizer updates (nn::Parameter::steer)
  Tensor segments;      ///< f64 [1, 4]: all of a rank's elements of the momentum, none decayed; [0, 4] if it has none
  FlatBuffer& flat() const { return unit->buffers()[buffer]; }
};

/// DiLoCo's outer optimizer (Douillard et al., https://arxiv.org/abs/2311.08105, algorithm 1): for each trained parameter, with its
/// values p_i on the k islands and their common values q after the last outer step,
///
///   g = q - mean(p_i),   b = momentum b + g,   q = q - lr (g + momentum b),   p_i = q
///
/// Steered parameters become their mean. The inner optimizer's state stays separate on each island. Masters are f32 or f64.
class DiLoCo {
 public:
  /// For a materialized model that is sharded over `mesh` without `axis` (World::slice). Calls begin(). ConfigError if it is sharded
  /// otherwise, and for options out of range.
  DiLoCo(nn::Module& module, const Mesh& mesh, const std::string& axis, const DiLoCoOptions& options = {});

  /// Makes the current parameters, which must be the same on all islands, those of the last outer step; resets the momentum.
  void begin();
  /// Restores the parameters of the last outer step; what islands have learned since is lost. Collective over all of them.
  void go_back();
  /// Collective over all islands, outside of any recording or recorded as part of an update. Gradients are unchanged.
  void step();

  int islands() const { return mesh_->size(axis_); }
  int island() const;  ///< this rank's
  const std::vector<OuterShard>& shards() const { return shards_; }
  int64_t state_bytes() const;  ///< of this rank, in addition to masters and the inner optimizer's

 private:
  void add_shard(const std::shared_ptr<Unit>& unit, size_t buffer);
  Layout layout_of(const OuterShard& shard, Placement islands) const;
  OuterState state(const OuterShard& shard, std::optional<OwnershipMap> cut, bool offload) const;
  /// A value [R, n] as each island's row, a view.
  Tensor as_rows(const Tensor& whole) const;
  /// Sizes of the islands' parts of a rank's elements are multiples of this.
  int64_t part_size() const { return options_.moves == Moves::int8 ? kBlockSize : FlatLayout::kAlign; }
  bool rounds(const FlatBuffer& b) const { return options_.moves != Moves::whole && b.has_slope(); }
  /// Updates `to` by an SGD step with this gradient.
  void descend(const OuterShard& shard, const Tensor& to, const Tensor& gradient) const;
  /// Its parameters after the last outer step, whole on each island.
  Tensor whole(const OuterShard& shard) const;
  void step_whole(OuterShard& shard) const;
  void step_by_moves(OuterShard& shard) const;
  Tensor in_fewer_bits(const Tensor& x, int axis) const;
  Tensor in_values(const Tensor& x, const Type& type) const;

  const MeshSpec* mesh_;
  int axis_;
  DiLoCoOptions options_;
  Tensor scalars_;  // of kernels::cpu::sgd
  std::vector<OuterShard> shards_;
};

}  // namespace sheaf::optim
