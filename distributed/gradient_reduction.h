// GradientReduction: reduces the gradients of a unit from its slots to the placement of its masters.
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "sheaf/distributed/unit_layout.h"

namespace sheaf {

/// At most one reduction is in progress: see [Note: reduction]. Gradients of several micro-batches are summed until then. It belongs
/// to its rank's compute thread.
class GradientReduction {
 public:
  /// For the unit's buffers, whose `grad` it stores.
  explicit GradientReduction(UnitLayout& unit) : unit_(unit) {}

  /// Issues the reduction of the slots of a backward, one for each trainable buffer; `to_the_end`: along all axes of the mesh, not only
  /// the unit's own, where those of several micro-batches are added up first.
  void start(std::vector<Tensor> slots, bool to_the_end);
  /// Waits for the pending collective, if any, and issues the next one; after the last, the gradient is stored.
  void advance();
  /// Waits until the gradient is stored.
  void complete();
  /// The gradient of the step, the sum over its micro-batches along all axes, is for `use`: called once, by complete() or
  /// use_if_stored().
  void when_stored(std::function<void()> use) { use_ = std::move(use); }
  void use_if_stored();

  /// Adds slots to the waiting ones (zero1).
  void add_to_waiting(std::vector<Tensor> gradients);
  bool has_waiting() const { return !unreduced_.empty(); }
  /// Has begun, and the gradient is not stored yet.
  bool in_progress() const { return !values_.empty() || !offload_.gradients.empty(); }
  std::vector<Tensor> take_waiting() { return std::exchange(unreduced_, {}); }
  /// Starts the reduction of the waiting gradients, along all axes.
  void start_waiting();

  /// Discards all gradients, also those of a failed backward. Waits for the lane.
  void forget();
  /// Releases references to the memory of the recording that has started the reduction, if it is this one. Waits for the lanes.
  void recording_ended(uint64_t recording);

 private:
  using Reduced = std::pair<const FlatBuffer*, size_t>;  // a buffer, and which of `values_` is its gradient

  void leaf_waiting();
  void reduce_along(int axis, std::vector<Tensor> addends);
  void exchange_blocks(int axis, std::span<const Reduced> which);
  Type sum_type(const FlatBuffer& b, const Type& blocks) const;
  bool add_blocks();
  void cast_reduced();
  void keep_gradient();
  void offload_gradient(FlatBuffer& b, const Tensor& gradient);
  void complete_offload();

  UnitLayout& unit_;
  std::vector<Tensor> unreduced_;  // sums over micro-batches: zero1's slots, else what is not summed over replicas yet
  std::vector<Tensor> inputs_;     // what the lane reads until advance(): the slots, a slice along a secondary axis, or casts of them
  std::vector<Tensor> values_;     // one per trainable buffer; empty: nothing is pending. Destroyed before its inputs: waits for its lane
  int along_ = -1;                 // the axis of the pending collective
  bool to_the_end_ = false;
  bool is_stored_ = false;  // to the end
  std::function<void()> use_;
  uint64_t recording_ = 0;         // that has started it
  struct Offload {  // to the host's memory, by the lane of copies
    std::vector<Tensor> gradients, from;
  };
  Offload offload_;
};

}  // namespace sheaf
