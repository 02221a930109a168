// Unit: parameters that share one flat buffer, sharded over ranks. FSDP is implemented here, as nodes of the tape:
//
//   forward    all_gather    one, with an output per parameter, when the unit's module is entered
//              discard       when it is left; delayed until another unit is gathered, and longer if it is needed again soon
//   backward   all_gather    the mirror of the discard, only if a saved recipe needs it
//              reduce_scatter one per unit and backward, after every use, from the slots that the kernels wrote into
//              discard
//
// zero1 keeps the gathered values and the slots from one micro-batch to the next: one all_gather and one reduce_scatter per step.
// On a mesh with further axes (hybrid sharding) the model is replicated along those: Invariant at rest, and the slice that the step's
// last reduce_scatter yields is all_reduced along each of them, while the next unit's backward runs.
// Along a secondary axis the masters are sharded, too: a buffer is [ranks of the unit's axis, elements of a slice], Shard(0) on that
// axis and Shard(1) on the secondary one. Its ranks gather their slices once a step, for all micro-batches (copies), and the unit's
// own gathers start from these; a gradient's remaining slice is reduce_scattered.
// On a GPU masters and gradients may be kept in host memory (offload). A gather's input is then first copied to the GPU, and the
// reduced gradient is copied back, both on the copy lane, concurrently with compute; a single rank gathers in this way, too.
// Along a stage axis a unit is on one rank, the stage that computes with it; other ranks have nothing. Units in no stage are
// replicated along that axis as along others. Along a tensor axis parameters that it does not shard are replicated. Of the others a
// rank has its block, which is neither gathered nor reduced along that axis: the buffer has one more leading dimension, Shard(0)
// there.
//
// Ranks may send int8 blocks (unit_blocks.cc): weights are unpacked when the unit is opened, and gradients are summed after they have
// arrived.
//
// The buffer is the wire layout: parameters are views into the gather's output, kernels write gradients into the reduce-scatter's
// input, or into that of its cast if they are sent in another dtype. Every parameter and every rank's slice starts on 128 bytes;
// padding stays zero.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/block_format.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/runs.h"
#include "sheaf/distributed/gather_schedule.h"

namespace sheaf {

enum class Strategy : uint8_t {
  none,           ///< no mesh: one rank holds everything
  replicate,      ///< DDP: Invariant at rest, gradients all-reduced
  zero1,          ///< ZeRO-1: Shard at rest, gathered once a step, gradients Partial until the step reduces them
  shard_grad_op,  ///< ZeRO-2: Shard at rest, kept gathered until the unit's backward is done
  full_shard,     ///< ZeRO-3: Shard at rest, discarded after forward and gathered again
};
std::string_view name(Strategy s);
/// The strategy with this name(); throws a ConfigError that lists the known ones, or says what to write instead.
Strategy strategy_from(std::string_view name);

struct LeafSpec {
  std::string name;  ///< "blocks.0.attention.qkv.weight"
  Shape shape;
  DType dtype = kF32;
  bool trainable = true;
  std::optional<OwnershipMap> cut = std::nullopt;  ///< along the unit's tensor axis; absent: it is replicated there
  bool exact = false;      ///< compute uses its own dtype, whatever that of the unit's other leaves
  bool bias = false;       ///< nn::Parameter::bias()
  double steered = 0;      ///< a step moves it by this against its gradient's sign (nn::Parameter::steer); 0: the optimizer updates it
  std::optional<BlockFormat> blocks = std::nullopt;  ///< it is the bytes (u8, frozen) of values quantized in blocks
};

/// Where each parameter is in its flat buffer: a pure function of the shapes and the number of ranks, so any rank can
/// compute any other's intervals without asking.
struct FlatLayout {
  std::vector<int64_t> offsets;  ///< elements, multiples of `align`
  int64_t total = 0;             ///< elements, a multiple of ranks · parts · align
  int64_t chunk = 0;             ///< total / ranks
  static constexpr int64_t kAlign = 32;  // elements: 128 bytes of f32, and the block of the gradient norm
  /// Each rank's slice can be split further into `parts` equal parts.
  static FlatLayout of(const std::vector<Shape>& shapes, int ranks, int64_t align = kAlign, int64_t parts = 1);
};

/// One flat buffer of a unit: parameters of one dtype that agree in being trainable or frozen, sharded along the tensor axis or not,
/// exact or not, steered by one rate or not, gathered in blocks or not. For sharded ones `layout` has room for the largest block; a
/// smaller one leaves padding.
struct FlatBuffer {
  std::string name;
  DType dtype = kF32;       ///< of the master values and of gradients
  DType compute = kF32;     ///< of the values that are gathered for compute
  DType reduce = kF32;      ///< of gradients when sent between ranks
  bool gather_int8 = false;  ///< its values are gathered in int8 blocks, if other ranks receive them
  bool reduce_int8 = false;  ///< its gradients are sent in int8 blocks
  bool trainable = true;
  bool cut = false;         ///< its leaves are sharded along the unit's tensor axis
  bool exact = false;       ///< its leaves are exact: neither values nor gradients are cast
  double steered = 0;       ///< the rate of its leaves, whose gradients are measurements; 0: true gradients
  std::vector<int> leaves;  ///< indices into the unit's leaves, in buffer order
  FlatLayout layout;
  Tensor shard;             ///< master values: [total] Shard(flat), or Invariant, or without a mesh; other axes Invariant. If leaves are
                            ///< cut [ranks, total], Shard(0) on the tensor axis and Shard(1) or Invariant. With a secondary axis
                            ///< [.., ranks, slice], the last two dimensions sharded
  Tensor grad;              ///< of the same type; undefined until reduced, see reduce_waiting()
  Tensor grad_scale;        ///< scalar by which the optimizer multiplies grad (clipping); undefined: 1
  Tensor found_inf;         ///< i32 scalar: not 0 if the optimizer's step is to be skipped (loss scaling); undefined: 0
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
  int axis = 0;                    ///< the one that `strategy` shards; along others, except the tensor and secondary axes, masters are
                                   ///< replicated
  Strategy strategy = Strategy::none;
  std::optional<DType> compute = std::nullopt;  ///< what masters are cast to before they are gathered; gradients stay in the
                                                ///< masters' dtype
  std::optional<DType> reduce = std::nullopt;   ///< what gradients are cast to before each reduction, and back from after it
  bool gather_int8 = false;        ///< parameters of two or more dimensions, except biases, are gathered in int8 blocks
  bool reduce_int8 = false;        ///< gradients are sent in int8 blocks instead of in `reduce`
  bool whole_blocks = false;       ///< parameters begin on whole blocks even without int8
  int tensor_axis = -1;            ///< shards leaves that have a `cut`; -1: none
  int secondary_axis = -1;         ///< shards the masters again after `axis`; -1: none. Needs a strategy that shards
  int stage_axis = -1;             ///< the unit is on one rank of it; -1: on all
  int stage = 0;                   ///< which
  bool offload = false;            ///< on a GPU, masters and gradients are kept in host memory. Needs a strategy that shards
};

/// One rank's share of a unit. Not thread-safe: belongs to its rank's compute thread.
class Unit final : public LeafGroup, public std::enable_shared_from_this<Unit> {
 public:
  /// `schedule` is shared by the units of one model. Throws ConfigError for a cut that leaves a rank nothing.
  Unit(std::string name, std::vector<LeafSpec> leaves, const UnitOptions& options, std::shared_ptr<GatherSchedule> schedule);
  ~Unit() override;

  // --- a module's scope ---
  void enter();
  void leave();

  // --- LeafGroup ---
  Tensor value(int index) override;
  Tensor slot(int index) override;
  Tensor memory_like_slot(int index) override;
  bool accepts_early_gradient(int index, const Type& gradient) const override;
  void drop_slots() override;
  void pass() override;
  void pass_constant() override;
  void finish(const std::vector<bool>& contributed) override;
  int num_leaves() const override { return static_cast<int>(leaves_.size()); }
  bool trainable(int index) const override { return leaves_[index].trainable; }
  uint64_t version() const override;
  const std::string& group_name() const override { return name_; }
  void gradient_passed() override;
  void backward_begins() override { schedule_->backward_begins(); }
  void backward_ended() override;
  void recording_ended() override;
  /// Closes everything gathered or cast from the masters, even if its scope is still open.
  void close_for_change() override;
  bool holds_gradients() const override;

  // --- at rest ---
  /// Allocates zeroed memory. The values are then written through pieces().
  void allocate(Device device);
  std::vector<FlatBuffer>& buffers() { return buffers_; }
  const std::vector<LeafSpec>& leaves() const { return leaves_; }
  std::vector<LocalPiece> pieces(const FlatBuffer& buffer) const { return pieces(buffer, {0, buffer.layout.total}); }
  /// The same for elements [begin, end) of this rank's slice of the buffer; offsets count from `begin`.
  std::vector<LocalPiece> pieces(const FlatBuffer& buffer, Interval part) const;
  void zero_grad();
  /// Issues the reduction of gradients that wait for it (zero1, replicas, units shared by all stages); complete_reduction() ends it.
  /// LifetimeError if backward_weights() has not computed all gradients.
  void reduce_waiting();
  const std::string& name() const { return name_; }
  Strategy strategy() const { return strategy_; }
  const MeshSpec* mesh() const { return mesh_; }
  int axis() const { return axis_; }
  /// The mesh axis that shards this leaf, or -1.
  int cut_axis(int index) const { return is_cut(index) ? tensor_axis_ : -1; }
  /// The mesh axis on which the unit is on only one rank, or -1, and that rank's coordinate.
  int stage_axis() const { return stage_axis_; }
  int stage() const { return stage_; }
  /// Whether this rank has a part of it.
  bool is_here() const { return stage_axis_ < 0 || RankContext::current().coordinate(mesh_, stage_axis_) == stage_; }
  /// The type of the leaf's value in compute: Replicate except where it is cut.
  Type value_type(int index, DType dtype) const { return {dtype, leaves_[index].shape, value_layout(index)}; }
  const std::shared_ptr<GatherSchedule>& schedule() const { return schedule_; }

  // --- for the schedule ---
  int64_t gathered_bytes() const;
  void issue_gather(bool prefetched);
  void settle_and_unpack();  ///< also unpacks what was gathered in blocks
  void discard_gathered();
  /// Values that were never gathered (one rank, replicated masters) may be casts of old masters.
  void close_views();
  /// Bytes of the copy that a group holds for a step, along a secondary axis; 0 without one.
  int64_t copied_bytes() const;
  void issue_copies(bool prefetched);
  bool has_copies() const;
  bool copies_under_way() const { return copies_.under_way; }
  void drop_copies();
  /// Gathered for an earlier micro-batch, and not yet opened in this one.
  bool is_cached() const { return state_ == State::closed && !gathered_.empty(); }
  void open_cached();
  /// Waits for the pending collective, if any, and issues the next one; after the last, the gradient is stored.
  void advance_reduction();
  void complete_reduction();

 private:
  enum class State : uint8_t {
    closed,    ///< at rest, or cached: kept gathered for another micro-batch
    in_flight, ///< gather issued ahead of its use
    open,      ///< gathered and in use
    pending,   ///< its scope was left; discarded unless it is needed soon, see GatherSchedule
  };
  friend class GatherSchedule;

  bool opened_outside_recordings() const { return recording_ == 0; }
  bool shards() const { return strategy_ >= Strategy::zero1; }
  /// Values exist only between a gather and a discard; a single rank gathers only from host memory.
  bool gathers() const { return shards() && (!alone(axis_) || (offloads_ && !secondary())); }
  /// There are no other ranks along this axis.
  bool alone(int axis) const { return !mesh_ || mesh_->size(axis) == 1; }
  bool caches_gathered() const { return gathers() && strategy_ == Strategy::zero1; }
  /// A group's copy of the masters has to be gathered from the other groups.
  bool secondary() const { return secondary_axis_ >= 0 && !alone(secondary_axis_); }
  /// Every rank keeps a slice of a reduction along this axis.
  bool scatters(int axis) const { return !alone(axis) && (axis == axis_ ? shards() : axis == secondary_axis_); }
  bool is_cut(int leaf) const { return tensor_axis_ >= 0 && leaves_[leaf].cut; }
  /// The shape of `rank`'s block of a leaf on the tensor axis.
  Shape block_shape(int leaf, int rank) const;
  /// The largest of them; ConfigError if a rank has none.
  Shape largest_block(int leaf) const;
  /// Placed as given on every axis except the stage axis.
  Layout placed(Placement everywhere) const;
  /// The layout of masters: sharded on the unit's axis if the strategy says so, Invariant on others.
  Layout resting(const FlatBuffer& b) const;
  /// The layout of values in compute: Replicate on every axis, except where leaves are cut.
  Layout whole(const FlatBuffer& b) const;
  Layout value_layout(int leaf) const;
  Type buffer_type(const FlatBuffer& b, DType dtype, const Layout& layout) const;
  Type slots_type(const FlatBuffer& b) const;
  Type slot_type(int leaf) const;
  /// Gathers do not read the masters themselves, but values computed from them or copied from the host.
  bool is_made_for_gather(const FlatBuffer& b) const { return offloads_ || b.compute != b.dtype || sends_blocks(b); }
  bool sends_blocks(const FlatBuffer& b) const { return b.gather_int8 && gathers() && !alone(axis_); }
  /// Gathered buffers must be unpacked before use.
  bool is_packed() const { return std::ranges::any_of(buffers_, [this](const FlatBuffer& b) { return sends_blocks(b); }); }
  /// The input of the gather: masters in the compute dtype, or the group's copies of them.
  std::vector<Tensor> gather_sources();
  std::vector<Tensor> masters_for_compute() const;
  std::vector<Tensor> take_copies();
  /// The types of the buffers that hold values, and of the values.
  std::vector<OutputSpec> gathered_specs() const;
  /// The type in which a buffer of this layout is sent.
  Type sent_type(const FlatBuffer& b, const Layout& layout) const;
  void complete_gather();
  void unpack();
  void ensure_open();
  void bind();
  void open_masters();
  void bind_views_into(std::span<const Tensor> buffers);
  void zero_missing(const std::vector<bool>& contributed);
  bool is_summed_over_stages() const;
  /// Whether gradients of these leaves are summed over ranks of this axis: not if each has its own block.
  bool sums_along(const FlatBuffer& b, int axis) const { return axis != stage_axis_ && (!b.cut || axis != tensor_axis_); }
  /// Whether gradients are summed over several ranks along further axes.
  bool sums_further() const;
  int axis_after(int axis) const;
  void add_to_waiting(std::vector<Tensor> gradients);
  void leaf_waiting();
  void reduce_waiting_along(int axis);
  void reduce_along(int axis);
  using Reduced = std::pair<const FlatBuffer*, size_t>;  // a buffer, and the index of its gradient among the values under reduction
  void exchange_blocks(int axis, std::span<const Reduced> which);
  Type sum_type(const FlatBuffer& b, const Type& blocks) const;
  bool add_blocks();
  void cast_reduced();
  void keep_gradient();
  void offload_gradient(FlatBuffer& b, const Tensor& gradient);
  void complete_offload();

  std::string name_;
  std::vector<LeafSpec> leaves_;
  std::vector<std::pair<int, int>> where_;  // leaf → (buffer, position in it)
  std::vector<FlatBuffer> buffers_;
  const MeshSpec* mesh_;
  int axis_, tensor_axis_, secondary_axis_, stage_axis_, stage_;
  Strategy strategy_;
  std::shared_ptr<GatherSchedule> schedule_;
  bool offload_;           // as requested; effective only on a GPU:
  bool offloads_ = false;  // whether it does
  bool allocated_ = false;

  State state_ = State::closed;
  int depth_ = 0;                  // open scopes of its module
  bool opened_by_vjp_ = false;     // only for vjps: no scope closes it
  // For a unit opened outside all scopes: the number of holders of each value at that time. While there are more, it is still in use
  // and not discarded.
  std::vector<int64_t> holders_;
  void note_holders();
  bool is_held() const;
  uint64_t recording_ = 0;         // the recording that knows the gathered values; 0 for none
  bool mirror_next_ = false;       // discarded in this recording's forward: the next gather mirrors that
  std::vector<Tensor> gather_inputs_;  // casts of the masters, or their copies from the host, which the gather reads until the unit is
                                       // opened
  std::vector<Tensor> gathered_;       // one per buffer; destroyed before its inputs, and waits for its lane
  struct Copies {                  // of the masters, for all micro-batches of a recording: casts, if nothing is gathered,
    std::vector<Tensor> inputs;    // or (buffers) what is gathered along the secondary axis, from casts until that is done
    std::vector<Tensor> buffers;   // declared last, so destroyed first: its destructor waits for the lane
    uint64_t recording = 0, version = 0;
    bool under_way = false;
  };
  Copies copies_;
  std::vector<Tensor> values_;     // one per leaf
  std::vector<Tensor> slot_buffers_, slots_;
  uint64_t slots_of_ = 0;          // the recording that created them
  int64_t pending_finishes_ = 0;   // backwards that have passed it, but whose weight gradients are deferred
  std::vector<Tensor> unreduced_;  // sums over micro-batches: zero1's slots, else gradients not yet summed over replicas
  struct Reduction {               // `values` is declared last, so destroyed first: its destructor waits for the lane
    std::vector<Tensor> inputs;    // of a reduction to slices: the slots, a slice along a secondary axis, or casts of them
    std::vector<Tensor> values;    // one per trainable buffer; empty: nothing is pending
    int along = -1;                // the axis of the pending collective
    bool to_the_end = false;       // false: reduction over replicas is left to a later micro-batch
  };
  Reduction reduction_;
  struct Offload {                 // gradients in flight to host memory
    std::vector<Tensor> gradients, from;
  };
  Offload offload_in_flight_;
};

}  // namespace sheaf
