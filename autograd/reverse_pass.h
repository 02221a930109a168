// ReversePass: one differentiation of a recording, from a scalar back to the values whose gradients are asked for. It lives as long
// as that runs; state that outlives it belongs to the recording.
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include "sheaf/autograd/recording.h"

namespace sheaf {

/// Whether gradients go no further back than its results: a leaf, or a constant, which may be watched.
inline bool ends_gradients(const Node& n) { return !n.op || n.op->stops_gradient; }

class ReversePass {
 public:
  /// Where the gradients of groups' leaves go.
  enum class Leaves : uint8_t {
    slots,      ///< into their groups' slots, and the groups are finished: backward(), backward_weights()
    values,     ///< they are gradients of values like others: gradient()
    direction,  ///< into the sum of derivative_along()
  };

  /// With `keep`, nothing that the pass reads is freed, and its nodes can themselves be differentiated.
  ReversePass(Recording& recording, Leaves leaves, bool keep);
  ReversePass(const ReversePass&) = delete;
  ReversePass& operator=(const ReversePass&) = delete;

  bool keeps() const { return keep_; }
  bool to_slots() const { return leaves_ == Leaves::slots; }
  bool is_last_micro_batch_of(const LeafGroup* group) const;
  /// A direction is being requested: units opened meanwhile are opened for their values only.
  bool asks_for_direction() const { return direction_ && direction_->asks; }

  /// The state of derivative_along()'s sum: the gradients of the groups whose uses the pass has passed.
  struct DirectionalSum {
    const Direction& direction;
    DType dtype = kF32;
    struct Part {
      LeafGroup* group;
      int leaf;
      Tensor gradient;
      NodeId from;  // the node that it is of
    };
    std::vector<Part> gradients = {};
    Tensor sum = {};
    bool asks = false;
  };

 private:
  friend class Recording;
  friend class Vjp;
  using GroupState = recorded::GroupState;
  using Region = recorded::Region;
  using ValueState = recorded::ValueState;

  /// While it lives this pass is the recording's current one; also ends when a derivative throws.
  struct Running {
    explicit Running(ReversePass& pass);
    ~Running();
    Recording& recording;
    const PhaseScope phase;
  };

  // backward.cc: what is asked for, before run()
  void want_parameters();                  // and all values computed from them
  void want(std::span<const ValueId> xs);  // the same
  void want_values(std::span<const ValueId> xs);
  void run(const Tensor& y);
  void run(recorded::DeferredWeights& weights);
  void reverse_through(NodeId begin, NodeId end);
  void differentiate(NodeId id, const Node& n);
  void release_saves(NodeId node);
  void finish_groups(NodeId node);
  int next_to_finish(NodeId node) const;  // -1: none
  void finish_group(size_t i);
  void release_groups(NodeId node);
  // accumulate.cc
  void accumulate(NodeId node, uint64_t needs, Vjp& vjp);
  void accumulate(NodeId node, ValueId v, Tensor gradient);
  Tensor as_dual(NodeId node, ValueId v, Tensor gradient, bool to_leaf);
  void add_to_value(NodeId node, ValueId v, Tensor gradient);
  void add_to_slot(NodeId node, ValueId v, Tensor gradient);
  Tensor& sum_of(ValueId v);
  GroupState& group_state(LeafGroup* group);
  const Tensor& slot_of(GroupState& group, int leaf, NodeId node);
  bool is_part_of_leaf(ValueId v) const;
  ValueId value_with_gradient_of(ValueId v) const;
  void expect_reducible(NodeId node, ValueId parameter, const Layout& gradient) const;
  // saved_values.cc, recompute.cc, overlap.cc, ops/offload.cc: what derivatives read
  Tensor resolve(ValueId v);
  void rematerialize(ValueId v);
  void recompute(Region& region);
  void expect_unchanged(const Region& region) const;
  NodeId single_collective_of(const Region& region) const;
  void start_regather(ValueId v);
  void release_regions(NodeId node, NodeId end);
  void onload(Region& region);
  void onload_last_before(NodeId end);
  // overlap.cc
  bool gradient_is_communicated(ValueId v) const;
  void compute_overlapped(size_t left = 0);
  void compute_deferred(recorded::DeferredGradient& deferred);
  // deferred_weights.cc
  void mark_deferring_groups();
  void finish_deferring(GroupState& group);
  // derivative_along.cc
  void add_directional(NodeId node);

  Recording& recording_;
  Tape& tape_;
  std::vector<Tensor>& gradients_;  // by value
  const Leaves leaves_;
  const bool keep_;
  std::vector<bool> wanted_;                         // values whose gradients are needed
  std::vector<bool> asked_;                          // of gradient(): the xs
  std::unordered_map<ValueId, ValueId> same_value_;  // of gradient(): gathers of one parameter, or copies, mapped to the first
  recorded::Parts parts_;                            // of backward(): what it differentiates
  bool last_micro_batch_ = false;
  bool defers_weights_ = false;                         // weight gradients are deferred
  bool in_backward_weights_ = false;                    // it computes those that were deferred
  std::vector<recorded::DeferredGradient> overlapped_;  // see [Note: overlap]
  DirectionalSum* direction_ = nullptr;
};

}  // namespace sheaf
