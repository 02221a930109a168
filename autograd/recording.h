// Recording: the scope in which ops are recorded on a tape, for as long as it lives, on its thread: there is no no_grad and no global
// reset. Its result is a Tape, a plain value.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>

#include "sheaf/autograd/recorded.h"
#include "sheaf/autograd/recording_scopes.h"

namespace sheaf {

struct RecordingOptions {
  int64_t step = 0;          ///< part of dropout's key
  int64_t first_sample = 0;  ///< global index of the first sample of this batch; part of dropout's key
  uint64_t seed = 0;
  bool capture_leaves = false;  ///< keep a copy of every leaf's initial value (for replay), each with memory of its own: a store into one
                                ///< leaf is not read from another that shares its memory, as it is in a Program over leaves()
  /// Gradients of this recording will be differentiated again. Then none is computed in the forward already, as a linear head's loss
  /// otherwise does: an early gradient has no derivative.
  bool higher_order = false;
  /// Products are computed while their rows, and other gradients, are in flight: see [Note: in pieces], [Note: overlap]. Without it
  /// they are not, for comparison: with the same bits, except for sums of a weight that several layers share, and products on GPUs.
  bool overlap = true;
  /// Values gathered for products, and results of products that are scattered, are communicated in pieces of at least this many rows;
  /// 0: whole. See [Note: in pieces].
  int64_t piece_rows = 128;
  /// Returns random_state() for the samples that begin `after` samples after first_sample. For a step that will be replayed: the
  /// caller sets these tensors before each replay. Null: created anew each time.
  std::function<Tensor(int64_t after)> random_states = {};
};

struct BackwardOptions {
  /// This is the step's last: gradients whose reduction waits for the step's end (strategy zero1, replicas) are reduced while it, or
  /// its backward_weights(), runs. Without it they are reduced when first asked for; so are those of parameters that all pipeline
  /// stages share.
  bool last_micro_batch = false;
  /// For a micro-batch that was recorded in parts (resume_micro_batch): differentiate only the last part that no backward has
  /// differentiated yet. The next backward of the same loss continues with the part before.
  bool last_part_only = false;
  /// Weight gradients are deferred to backward_weights(), and so are the reductions of their units. Activation gradients, which other
  /// stages wait for, are ready sooner: see [Note: deferred weights].
  bool defer_weights = false;
};

struct GradientOptions {
  /// Keep what a second differentiation needs, until the result's backward, or the backward of the value it is the gradient of.
  /// Units' gradients are then reduced once more: see [Note: directions].
  bool keep = false;
};

/// Host side effects of a step that are not on its tape: to be called before it runs again, and behind that.
struct Reruns {
  std::vector<std::function<void()>> before, after;
};

class ReversePass;

class Recording {
 public:
  explicit Recording(const RecordingOptions& options = {});
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  /// The recording of this thread, or null.
  static Recording* current();
  static uint64_t current_serial();  ///< its serial(); 0 outside of any
  /// The recording with this serial() that is current, or encloses the current one; null if it is over.
  static Recording* living(uint64_t serial);

  /// Differentiates a scalar loss with respect to every trainable parameter that was used; their gradients are accumulated in their
  /// units until the optimizer's zero_grad(). The loss must be Partial or Invariant on every mesh axis, even one of size 1, or have
  /// no mesh. It frees what the forward saved: a second backward is for values computed since (the next micro-batch); to
  /// differentiate several losses of one forward, add them. If several micro-batches were recorded, it differentiates those that lead
  /// to the loss, and leaves the others for separate backwards. If it throws, units that it had finished have a part of its gradients,
  /// and cannot be used until zero_grad() (LifetimeError); for others it has not run.
  void backward(const Tensor& loss, const BackwardOptions& options = {});
  /// Computes the weight gradients deferred by the oldest backward with defer_weights: one call for each such backward, before the
  /// optimizer's step. LifetimeError if there is none, or inside of a RecomputeScope.
  void backward_weights();
  /// The gradients of scalar `y` with respect to any recorded values, each in the dual of its layout (zeros where y does not depend
  /// on it); of a parameter, through every gather of it. With keep, the result can be differentiated again.
  std::vector<Tensor> gradient(const Tensor& y, std::span<const Tensor> xs, const GradientOptions& options = {});
  /// The derivative of scalar `y` along a direction: the sum, over all trainable parameters p that lead to y, of <∂y/∂p,
  /// direction(p)>, in y's dtype; Partial on y's mesh. Its backward() leaves the product of y's Hessian with the direction in the
  /// units' gradients (Pearlmutter 1994, Fast exact multiplication by the Hessian). The direction is a constant. What that backward
  /// needs is kept until then, or until the recording ends. See [Note: directions]; RecordingOptions::higher_order. Not for pipelines
  /// (PlacementError).
  Tensor derivative_along(const Tensor& y, const Direction& direction);
  /// Declares a constant differentiable, before its first use: gradient() may then ask for it.
  Tensor watch(const Tensor& x);

  const Tape& tape() const { return tape_; }
  /// Closes what is still open and moves the tape out; the recording is over.
  Tape take();
  const RecordingOptions& options() const { return options_; }
  /// Its tape will be run again, with other inputs: values that depend on the step must not be computed on the host.
  bool is_for_program() const { return options_.random_states != nullptr; }
  /// i64[3] = {seed, step, first_sample} on `device`: an input of random ops, so that a step's program never changes.
  Tensor random_state(Device device);
  /// Begins the next micro-batch of this step, whose first sample has global index `first_sample`: dropout is keyed as if the samples
  /// were one batch. Gradients are summed, not averaged: each micro-batch's loss is divided by the number of targets of the whole
  /// step (CrossEntropyOptions::divide_by; docs/own_models.md has the loop). `random_state`, if given, is used as random_state().
  /// options().first_sample is the micro-batch's from then on.
  void next_micro_batch(int64_t first_sample, const Tensor& random_state = {});
  /// Continues a micro-batch after others have been recorded or differentiated. What is recorded from here on is a separate part
  /// (BackwardOptions::last_part_only).
  void resume_micro_batch(int64_t first_sample, const Tensor& random_state = {});
  /// Counts the calls of one module path within a micro-batch, to key dropout.
  int64_t next_call(const std::string& path) { return calls_[options_.first_sample][path]++; }
  /// Copies of the leaves' initial values; needs capture_leaves.
  const std::unordered_map<ValueId, Tensor>& captured() const { return captured_; }
  ValueId value_of(const Tensor& t) const;  ///< -1 if not of this recording
  static constexpr size_t kMostInputs = 64;  ///< of one op
  /// The leaves themselves: the memory that a program of this tape reads and updates.
  std::unordered_map<ValueId, Tensor> leaves() const;
  uint64_t serial() const { return serial_; }  ///< unique in the process, never 0
  /// `source` is being sent; keeps it alive until it is. See [Note: sends].
  void keep_until_sent(const recorded::SendRoute& route, const Tensor& sent, const Tensor& source);
  /// A host side effect of this step that is not on the tape, such as counting it. When the tape runs again (compile()), so does
  /// `effect`, before it.
  void on_rerun(std::function<void()> effect) { reruns_.before.push_back(std::move(effect)); }
  /// The same behind it, if it did not fail.
  void after_rerun(std::function<void()> effect) { reruns_.after.push_back(std::move(effect)); }
  const Reruns& reruns() const { return reruns_; }
  /// The name of a used group that holds_gradients(), if there is one.
  std::optional<std::string> group_with_gradients() const;

  // --- for apply(), units and optimizers ---
  /// The id of `t`, which becomes a leaf if this recording has not seen it. Called before an op changes its memory: capture_leaves
  /// copies it here.
  ValueId leaf(const Tensor& t, std::string_view name);
  /// Records one executed op. `specs[i]` says where output i was placed.
  NodeId record(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<Tensor> outputs,
                std::span<const OutputSpec> specs, bool add = false);
  /// The tensors are the values of `group`'s leaves, in order, as its masters are now. A prefetch binds before its first use;
  /// parameters gathered in int8 blocks have no tensors before they are unpacked.
  void bind_group(const std::shared_ptr<LeafGroup>& group, std::span<const Tensor> tensors);
  /// For an op of the forward that knows the gradient of `leaf` up to a factor: the leaf's slot, if it is unused and of that type; else
  /// undefined. The caller passes what it stores there to note_early_gradient(). See [Note: early gradients].
  Tensor slot_for_early_gradient(const Tensor& leaf, const Type& gradient);
  void note_early_gradient(const Tensor& gradient, const Tensor& leaf);
  /// Whether its gradient may be asked for: it depends on a trainable parameter, or on a watched value.
  bool has_gradient(const Tensor& t) const;
  /// For memory that an op of the forward changes: LifetimeError if a value computed there has a derivative, since it would change.
  void expect_no_gradient(const char* op, const Tensor& memory) const;
  /// For an op that stores into existing memory: LifetimeError inside of a RecomputeScope.
  void expect_no_recomputation(const char* op) const;
  /// `memory` now holds `x`, whose gradient a store does not propagate: asking for it through `memory` is an error.
  void note_change(const Tensor& memory, const Tensor& x);
  /// Derivatives of composites, by number; see [Note: custom_vjp].
  int64_t add_derivative(std::function<void(Vjp&)> vjp) {
    derivatives_.push_back(std::move(vjp));
    return static_cast<int64_t>(derivatives_.size()) - 1;
  }
  const std::function<void(Vjp&)>& derivative(int64_t i) const { return derivatives_[static_cast<size_t>(i)]; }
  /// The group's values are used from here on: the reverse pass finishes the group when it has reached this point.
  void use_group(const LeafGroup* group);
  Phase phase() const { return phase_; }
  void flag_next(uint8_t flags) { next_flags_ |= flags; }
  /// The purpose (HeldFor) of the memory of the next op's outputs.
  HeldFor next_held_for(const OpDef& op) const {
    return held_for(op, phase_, static_cast<uint8_t>(next_flags_ | (rematerializing_ ? Node::kRecomputed : 0)));
  }
  bool in_backward() const { return phase_ == Phase::backward; }
  bool in_recompute_scope() const { return in_region_; }
  /// For the backward in progress: no earlier part uses `group`.
  bool is_last_micro_batch_of(const LeafGroup* group) const;

 private:
  friend class PhaseScope;
  friend class RecomputeScope;
  friend class ReversePass;
  friend class Vjp;
  using ValueState = recorded::ValueState;
  using GroupState = recorded::GroupState;
  using Region = recorded::Region;
  using Segment = recorded::Segment;
  /// Of masks of inputs and outputs. Outputs may be more than 64: the further ones are never saved.
  static constexpr uint64_t bit(int i) { return i < 64 ? uint64_t{1} << i : 0; }
  static constexpr uint64_t first_bits(size_t n) { return n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}; }
  // recording.cc
  void end();
  void expect_can_differentiate(const char* who) const;
  ValueState& state(ValueId v);
  bool saves() const;  // whether values recorded now are saved for derivatives
  void note_places(const OpDef& op, ValueId first, std::span<const OutputSpec> specs);
  void save_for_backward(NodeId node, std::span<const Tensor> inputs, std::span<Tensor> outputs, uint64_t needs);
  void evict_early_gradients(LeafGroup* group, NodeId node);
  void note_reading(const Tensor& t, ValueId v);
  void expect_read_here(const OpDef& op, int input, const Tensor& t) const;
  bool is_for_direction(const LeafGroup* group) const;
  GroupState& new_group_state(const std::shared_ptr<LeafGroup>& group);
  // backward.cc
  static void expect_scalar(const char* who, const Tensor& y);
  ValueId expect_value(const char* who, const char* what, const Tensor& t) const;
  void expect_parameters(const char* who, const char* what, ValueId v) const;
  void give_up_used_groups();
  void forget_used_groups();
  // micro_batches.cc: what is recorded in segments, and which of them a backward takes
  void begin_part(int64_t first_sample, const Tensor& random_state);
  void end_segment();
  void begin_derivative();
  void take_groups(std::vector<GroupState>& groups);
  recorded::Parts take_parts(ValueId loss, bool last_part_only);
  std::vector<Segment> take_segments_of(ValueId loss);
  void keep_gradients_for(recorded::RemainingParts& remaining);
  // recompute.cc: regions whose values are computed again
  void note_entering(std::span<const ValueId> ids, std::span<const Tensor> inputs);
  void note_made(std::span<const Tensor> outputs);
  bool made_in_region(ValueId v) const;
  void end_region();
  void drop_unread_regions();
  void set_recomputed(const Region& region, bool recomputed);
  std::vector<NodeId> nodes_to_recompute(const Region& region) const;
  // ops/offload.cc, ops/send.cc
  void offload_last_region();
  void complete_offloads();
  void complete_send(const recorded::PendingSend& l);
  void complete_sends();

  RecordingOptions options_;
  int64_t first_sample_;  // of the step
  Recording* previous_;
  uint64_t serial_;
  std::unique_ptr<recorded::Lists> lists_;
  Tape& tape_;
  std::vector<ValueState>& states_;
  std::vector<Tensor>& gradients_;
  std::vector<std::pair<uint64_t, uint64_t>>& node_saves_;
  Phase phase_ = Phase::forward;
  uint8_t next_flags_ = 0;
  bool rematerializing_ = false;
  ReversePass* pass_ = nullptr;  // in progress
  std::unordered_map<const Tensor::Impl*, std::pair<Tensor, ValueId>> leaves_;
  std::vector<recorded::Stored> stored_;
  std::vector<std::pair<NodeId, ValueId>> stored_values_;  // what the forward read of stored_, by the node that stored it
  std::vector<recorded::EarlyGradient> early_gradients_;
  std::vector<GroupState> groups_;                      // used since the last segment
  std::vector<std::shared_ptr<LeafGroup>> all_groups_;  // all that were used
  Reruns reruns_;
  std::deque<std::function<void(Vjp&)>> derivatives_;
  std::vector<recorded::PendingSend> pending_sends_;
  uint64_t epoch_ = 0;                                                  // micro-batches and backwards begun: identifies sends
  NodeId segment_begin_ = 0;                                            // where the last segment begins; its groups are groups_
  int64_t micro_batch_ = 0, micro_batches_ = 0;                         // number of the current one, and how many were begun
  std::unordered_map<int64_t, int64_t> micro_batch_of_;                 // the last one with this first sample
  std::vector<Segment> pending_segments_;                               // segments before it
  std::unordered_map<ValueId, recorded::RemainingParts> remaining_;     // parts, by loss
  std::deque<recorded::DeferredWeights> deferred_weights_;              // the last one of the pass under way, if it puts them off
  std::unordered_map<ValueId, PendingRedistribute> pending_gradients_;  // gradients on their way
  std::vector<std::pair<Tensor, Tensor>> pending_offloads_;             // to the host, from the device
  std::vector<Region> regions_;                                         // in order; the last one has no end while its scope is open
  bool in_region_ = false;
  bool selective_ = false;  // see RecomputeOptions
  std::unordered_map<ValueId, Tensor> captured_;
  std::unordered_map<int64_t, std::unordered_map<std::string, int64_t>> calls_;  // by first sample
  Tensor random_state_;
  int derivative_order_ = 0;    // derivatives taken since the current micro-batch, or the ops after a backward, began
  bool is_derivative_ = false;  // whether what has been recorded since the last segment is one
};

/// Throws LifetimeError, in the name of `who`, inside a recording.
void expect_no_recording(const char* who);

}  // namespace sheaf
