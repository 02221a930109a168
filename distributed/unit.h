// Unit: parameters that share one flat buffer, sharded over ranks. FSDP is implemented here, as nodes of the tape:
//
//   forward    all_gather    one, with an output per parameter, when the unit's module is entered
//              discard       when it is left; delayed until another unit is gathered, and longer if it is needed again soon
//   backward   all_gather    the mirror of the discard, only if a saved recipe needs it
//              reduce_scatter one per unit and backward, after every use, from the slots that the kernels wrote into
//              discard
//
// zero1 keeps the gathered values and the slots from one micro-batch to the next: one all_gather and one reduce_scatter per step.
// On a mesh with further axes (hybrid sharding) the model is replicated along those: the slice that the step's last reduce_scatter
// leaves is all_reduced along each of them, while the next unit's backward runs.
// Along a secondary axis ranks gather their slices of the masters once a step, for all micro-batches (copies), and the unit's own
// gathers start from there; a gradient's remaining slice is reduce_scattered.
// On a GPU masters and gradients may rest in the host's memory (offload). A gather's input is then first brought to the GPU, and
// the reduced gradient leaves it, both on the lane of copies, concurrently with compute; a single rank gathers in this way, too.
// Along a stage axis a unit is on one rank, the stage that computes with it; other ranks have nothing. Units in no stage are
// replicated along that axis as along others.
//
// Ranks may send int8 blocks (unit_blocks.cc): weights are unpacked when the unit is opened, and gradients are summed after they have
// arrived.
//
// The parts of its buffers on each rank are described in unit_layout.h. Parameters are views into the gather's output, kernels write
// gradients into the reduce-scatter's input, or into that of its cast if they are sent in another dtype.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/gather_schedule.h"
#include "sheaf/distributed/gradient_reduction.h"
#include "sheaf/distributed/unit_layout.h"

namespace sheaf {

/// One rank's share of a unit. Not thread-safe: belongs to its rank's compute thread.
class Unit final : public LeafGroup, public UnitLayout, public std::enable_shared_from_this<Unit> {
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
  void backward_failed() override { has_failed_ = has_gradients() || is_consumed_; }
  void release() override;
  void release_values() override;
  void finish(const std::vector<bool>& contributed) override;
  int num_leaves() const override { return static_cast<int>(leaves_.size()); }
  bool trainable(int index) const override { return leaves_[index].trainable; }
  uint64_t version() const override;
  const std::string& group_name() const override { return name_; }
  void release_after_gradient() override;
  void backward_begins() override { schedule_->backward_begins(); }
  void backward_ended() override;
  void recording_ended(uint64_t recording) override;
  /// Closes everything gathered or cast from the masters, even if its scope is still open.
  void close_for_change() override;
  bool holds_gradients() const override;

  // --- at rest ---
  /// Allocates zeroed memory. The values are then written through pieces().
  void allocate(Device device);
  void zero_grad();
  /// As soon as the gradients of the step are reduced calls `update`, which may change the masters and consumes the gradients: then they
  /// are freed. It need not close what is made from the masters. zero_grad() cancels it; until then no backward may add to
  /// gradients that were consumed.
  void update_when_reduced(std::function<void()> update);
  /// LifetimeError in the name of `who`, which needs the gradients, if they were consumed.
  void expect_not_consumed(std::string_view who) const;
  /// Issues the reduction of gradients that wait for it (zero1, replicas, units shared by all stages); complete_reduction() ends it.
  /// LifetimeError if backward_weights() has not computed all gradients, or if they contain a part of a backward that failed.
  void reduce_waiting();
  void complete_reduction() { reduction_.complete(); }
  const std::shared_ptr<GatherSchedule>& schedule() const { return schedule_; }

 private:
  enum class State : uint8_t {
    closed,     ///< at rest, or cached: kept gathered for another micro-batch
    in_flight,  ///< gather issued ahead of its use
    open,       ///< gathered and in use
    pending,    ///< its scope was left; discarded unless it is needed soon, see GatherSchedule
  };
  friend class GatherSchedule;

  // --- for the schedule ---
  void issue_gather(bool prefetched);
  void settle_and_unpack();  ///< also unpacks what was gathered in blocks
  void discard_gathered();
  /// Values that were never gathered (one rank, replicated masters) may be casts of old masters.
  void close_views();
  void issue_copies(bool prefetched);
  bool has_copies() const;
  bool copies_under_way() const { return copies_.under_way; }
  void drop_copies();
  /// Gathered for an earlier micro-batch, and not yet opened in this one.
  bool is_cached() const { return state_ == State::closed && !gathered_.empty(); }
  void open_cached();

  bool opened_outside_recordings() const { return recording_ == 0; }
  /// The input of the gather: masters in the compute dtype, or the group's copies of them.
  std::vector<Tensor> gather_sources();
  std::vector<Tensor> masters_for_compute() const;
  std::vector<Tensor> take_copies();
  /// The types of the buffers that hold values, and of the values.
  std::vector<OutputSpec> gathered_specs() const;
  void complete_gather();
  void unpack();
  void ensure_open();
  void bind();
  void open_masters();
  void bind_views_into(std::span<const Tensor> buffers);
  void zero_missing(const std::vector<bool>& contributed);
  void make_slots();
  /// The values of parameters, made by the current recording.
  void take_values(std::span<const Tensor> values);
  bool is_summed_over_stages() const;
  bool has_gradients() const;
  void close_for_update();
  void note_holders();
  bool values_in_use() const;

  std::shared_ptr<GatherSchedule> schedule_;
  bool allocated_ = false;
  bool has_failed_ = false;  // gradients contain a part of a backward that failed
  bool is_consumed_ = false;  // the gradients of this step

  State state_ = State::closed;
  int depth_ = 0;               // open scopes of its module
  bool opened_by_vjp_ = false;  // only for vjps: no scope closes it
  // For a unit opened outside all scopes: the number of holders of each value at that time. While there are more, it is still in use
  // and not discarded.
  std::vector<int64_t> holders_;
  uint64_t recording_ = 0;             // the recording that knows the gathered values; 0 for none
  bool mirror_next_ = false;           // discarded in this recording's forward: the next gather mirrors that
  std::vector<Tensor> gather_inputs_;  // casts of the masters, or their copies from the host, which the gather reads until the unit is
                                       // opened
  std::vector<Tensor> gathered_;       // one per buffer; destroyed before its inputs, and waits for its lane
  // What is made from the masters for all micro-batches of a recording: casts of them if nothing is gathered; along a secondary axis,
  // what was gathered there.
  struct Copies {
    std::vector<Tensor> inputs;   // of that gather, until it is done
    std::vector<Tensor> buffers;  // declared last, so destroyed first: its destructor waits for the lane
    uint64_t recording = 0, version = 0;
    bool under_way = false;
  };
  Copies copies_;
  std::vector<Tensor> values_;  // one per leaf
  std::vector<Tensor> slot_buffers_, slots_;
  uint64_t slots_of_ = 0;               // the recording that they were made in
  int64_t pending_finishes_ = 0;        // backwards that have passed it, but whose gradients come later
  GradientReduction reduction_{*this};  // declared last, so destroyed first: it waits for its lane before the slots go
};

}  // namespace sheaf
