// UnitLayout: the parameters of a unit, their positions in its flat buffers, and each rank's part of these at rest, gathered and as
// gradients. All of it follows from the parameters' shapes and the mesh, identically on every rank.
//
// A buffer is the wire layout of a unit's collectives. Every parameter and every rank's slice starts on a multiple of 32 elements (128
// bytes in f32, 64 in bf16), or of 64 where blocks are sent; padding stays zero.
// Along the unit's axis masters are cut into equal slices, Shard(flat). Along a secondary axis slices are cut again: a buffer is
// [ranks of the unit's axis, elements of a slice], Shard(0) on that axis and Shard(1) on the secondary one. Along a tensor axis
// parameters that it does not cut are replicated; of the others a rank has its block, which is neither gathered nor reduced along that
// axis: one more dimension before the others, Shard(0) there. Along a stage axis the unit is on one rank; along all other axes masters
// are Invariant.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/core/block_format.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/runs.h"
#include "sheaf/core/tensor.h"
#include "sheaf/distributed/strategy.h"

namespace sheaf {

struct LeafSpec {
  std::string name;  ///< "blocks.0.attention.qkv.weight"
  Shape shape;
  DType dtype = kF32;
  bool trainable = true;
  std::optional<OwnershipMap> cut = std::nullopt;  ///< along the unit's tensor axis; absent: replicated there
  bool exact = false;  ///< computes in its own dtype, whatever that of the unit's other leaves
  bool bias = false;   ///< nn::Parameter::bias()
  double steered = 0;  ///< a step moves it by this against its gradient's sign (nn::Parameter::steer); 0: an optimizer decides
  std::optional<BlockFormat> blocks = std::nullopt;  ///< it is the bytes (u8, frozen) of values stored in blocks
};

/// The position of each parameter in its flat buffer: a pure function of the shapes and the number of ranks, so any rank can compute
/// any other's intervals locally.
struct FlatLayout {
  std::vector<int64_t> offsets;          ///< elements, multiples of `align`
  int64_t total = 0;                     ///< elements, a multiple of ranks · parts · align
  int64_t chunk = 0;                     ///< total / ranks
  static constexpr int64_t kAlign = 32;  // elements: 128 bytes of f32, and the block of the gradient norm
  /// Each rank's slice can be cut again into `parts` equal parts.
  static FlatLayout of(const std::vector<Shape>& shapes, int ranks, int64_t align = kAlign, int64_t parts = 1);
};

/// One flat buffer of a unit: its parameters of one dtype that are all trainable or all frozen, all sharded along the tensor axis or
/// none, all exact or none, all with one steering rate or none, all gathered in blocks or none. For sharded ones `layout` has room
/// for the largest block; a smaller one leaves padding.
struct FlatBuffer {
  std::string name;
  DType dtype = kF32;        ///< of the master values and of gradients
  DType compute = kF32;      ///< of the values that are gathered for compute
  DType reduce = kF32;       ///< of gradients when sent between ranks
  bool gather_int8 = false;  ///< its values are gathered in int8 blocks, if there are other ranks to send them to
  bool reduce_int8 = false;  ///< its gradients are sent in int8 blocks
  bool trainable = true;
  bool cut = false;         ///< its leaves are cut along the unit's tensor axis
  bool exact = false;       ///< its leaves are exact: neither values nor gradients are cast
  double steered = 0;       ///< the rate of its leaves, whose gradients are measurements; 0: slopes
  std::vector<int> leaves;  ///< indices into the unit's leaves, in buffer order
  FlatLayout layout;
  /// Master values: [total] Shard(flat), or Invariant, or without a mesh; other axes Invariant. Of cut leaves [ranks, total], Shard(0)
  /// on the tensor axis and Shard(1) or Invariant. With a secondary axis [.., ranks, slice], Shard of the last but one and the last
  /// dimension.
  Tensor shard;
  Tensor grad;        ///< of the same type; undefined until it was reduced, see reduce_waiting()
  Tensor grad_scale;  ///< scalar that the optimizer multiplies grad with (clipping); undefined: 1
  Tensor found_inf;   ///< i32 scalar: not 0 if the optimizer's step is to be skipped (loss scaling); undefined: 0
  Tensor squares;     ///< of a gradient that Unit::update_when_reduced() has consumed: the sum of its squares (nn/square_sums.h)
  /// Whether the optimizer's rule and the norm of gradients include it.
  bool has_slope() const { return trainable && steered == 0; }
};

/// Elements of a parameter that this rank holds contiguously. It may hold several such pieces of a parameter, or none.
struct LocalPiece {
  int leaf;
  Runs runs;             ///< of the parameter's row-major flat index
  int64_t shard_offset;  ///< elements, inside the rank's slice of the buffer
};

/// How a unit is placed on a mesh.
struct UnitOptions {
  const MeshSpec* mesh = nullptr;  ///< null: one rank holds everything
  int axis = 0;                    ///< that `strategy` is about; along others, except the tensor and secondary axes, masters are replicated
  Strategy strategy = Strategy::none;
  std::optional<DType> compute = std::nullopt;  ///< what masters are cast to before they are gathered; gradients stay in the
                                                ///< masters' dtype
  std::optional<DType> reduce = std::nullopt;   ///< what gradients are cast to before each reduction, and back from after it
  bool gather_int8 = false;                     ///< parameters of two or more dimensions, except biases, are gathered in int8 blocks
  bool reduce_int8 = false;                     ///< gradients are sent in int8 blocks instead of in `reduce`
  bool whole_blocks = false;                    ///< parameters begin on whole blocks even without either
  int tensor_axis = -1;                         ///< cuts leaves that have a `cut`; -1: none
  int secondary_axis = -1;                      ///< cuts the masters once more after `axis`; -1: none. Needs a strategy that shards
  int stage_axis = -1;                          ///< the unit is on one rank of it; -1: on all
  int stage = 0;                                ///< that rank's coordinate
  bool offload = false;                         ///< on a GPU, masters and gradients are kept in the host's memory. Needs a strategy that shards
};

/// A unit's parameters, their places in its buffers, and these buffers: masters and reduced gradients. What is gathered or in flight is
/// in Unit.
class UnitLayout {
 public:
  /// Throws ConfigError for a cut that leaves a rank without elements.
  UnitLayout(std::string name, std::vector<LeafSpec> leaves, const UnitOptions& options);

  const std::string& name() const { return name_; }
  const std::vector<LeafSpec>& leaves() const { return leaves_; }
  std::vector<FlatBuffer>& buffers() { return buffers_; }
  /// f(buffer, k) for the trainable buffers, counted by k: the order of a unit's gradients.
  template <class F>
  void each_trainable(F&& f) {
    size_t k = 0;
    for (FlatBuffer& b : buffers_)
      if (b.trainable) f(b, k++);
  }
  Strategy strategy() const { return strategy_; }
  const MeshSpec* mesh() const { return mesh_; }
  int axis() const { return axis_; }
  /// The mesh axis that cuts this leaf, or -1.
  int cut_axis(int index) const { return is_cut(index) ? tensor_axis_ : -1; }
  /// The mesh axis on which the unit is on only one rank, or -1, and that rank's coordinate.
  int stage_axis() const { return stage_axis_; }
  int stage() const { return stage_; }
  /// Whether this rank has a part of it.
  bool is_here() const { return stage_axis_ < 0 || RankContext::current().coordinate(mesh_, stage_axis_) == stage_; }
  /// The type of the leaf's value in compute: Replicate except where it is cut.
  Type value_type(int index, DType dtype) const { return {dtype, leaves_[index].shape, value_layout(index)}; }
  /// This rank's part of the parameters of an allocated buffer, in the order of its slice.
  std::vector<LocalPiece> pieces(const FlatBuffer& buffer) const { return pieces(buffer, {0, buffer.layout.total}); }
  /// The same for elements [begin, end) of this rank's slice of the buffer; offsets count from `begin`.
  std::vector<LocalPiece> pieces(const FlatBuffer& buffer, Interval part) const;
  /// Bytes of the gathered values; 0 where nothing is gathered.
  int64_t gathered_bytes() const;
  /// Bytes of the copy that a group holds for a step, along a secondary axis; 0 without one.
  int64_t copied_bytes() const;

  bool shards() const { return strategy_ >= Strategy::zero1; }
  /// Values exist only between a gather and a discard; a single rank gathers only from the host's memory.
  bool gathers() const { return shards() && (!alone(axis_) || (offloads_ && !secondary())); }
  /// Masters and gradients are in the host's memory.
  bool offloads() const { return offloads_; }
  /// There are no other ranks along this axis.
  bool alone(int axis) const { return !mesh_ || mesh_->size(axis) == 1; }
  bool caches_gathered() const { return gathers() && strategy_ == Strategy::zero1; }
  /// A group's copy of the masters has to be gathered from the other groups.
  bool secondary() const { return secondary_axis_ >= 0 && !alone(secondary_axis_); }
  /// Every rank keeps a slice of a reduction along this axis.
  bool scatters(int axis) const { return !alone(axis) && (axis == axis_ ? shards() : axis == secondary_axis_); }
  bool is_cut(int leaf) const { return tensor_axis_ >= 0 && leaves_[leaf].cut; }
  /// Whether gradients of these leaves are sums over ranks of this axis: not where each has its own block.
  bool sums_along(const FlatBuffer& b, int axis) const { return axis != stage_axis_ && (!b.cut || axis != tensor_axis_); }
  /// Whether gradients are summed over several ranks along further axes.
  bool sums_further() const;
  /// The axis along which gradients are summed after this one; -1 after the last.
  int axis_after(int axis) const;
  /// Gathers do not read the masters themselves, but something made from them or brought from the host.
  bool is_made_for_gather(const FlatBuffer& b) const { return offloads_ || b.compute != b.dtype || sends_blocks(b); }
  bool sends_blocks(const FlatBuffer& b) const { return b.gather_int8 && gathers() && !alone(axis_); }
  /// Whether gathered values must be unpacked before use.
  bool is_packed() const { return std::ranges::any_of(buffers_, [this](const FlatBuffer& b) { return sends_blocks(b); }); }

  /// Placed as given on every axis except the stage axis.
  Layout placed(Placement everywhere) const;
  /// The layout of masters: cut as the strategy says on the unit's axis, Invariant on others.
  Layout resting(const FlatBuffer& b) const;
  /// The layout of what enters compute: Replicate on every axis, except where leaves are cut.
  Layout whole(const FlatBuffer& b) const;
  Layout value_layout(int leaf) const;
  Type buffer_type(const FlatBuffer& b, DType dtype, const Layout& layout) const;
  /// The type in which a buffer placed so is sent.
  Type sent_type(const FlatBuffer& b, const Layout& layout) const;
  Type slot_buffer_type(const FlatBuffer& b) const;
  Type slot_type(int leaf) const;

 protected:
  std::string name_;
  std::vector<LeafSpec> leaves_;
  std::vector<std::pair<int, int>> where_;  // leaf → (buffer, position in it)
  std::vector<FlatBuffer> buffers_;
  const MeshSpec* mesh_;
  int axis_, tensor_axis_, secondary_axis_, stage_axis_, stage_;
  Strategy strategy_;
  bool offload_;           // masters and gradients are to be kept in the host's memory, if there is a GPU
  bool offloads_ = false;  // and they are

 private:
  /// The shape of the block of a leaf that `rank` of the tensor axis has.
  Shape block_shape(int leaf, int rank) const;
  /// The largest of them; ConfigError if a rank has none.
  Shape largest_block(int leaf) const;
};

}  // namespace sheaf
