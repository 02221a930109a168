// How a recording sees a unit of parameters: their values, and where their gradients are stored.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf {

/// Leaves that are gathered, reduced and updated together: a unit of parameters. Implemented by distributed/.
///
/// [Note: slots] The gradients of a group's leaves are in one buffer, its slots, which the reduction sends. The first contribution of
/// a backward is stored there by the kernel that computes it (or was in the forward, see [Note: early gradients]), later ones are
/// added. finish() is called once per backward, when the reverse pass has passed the group's first use, with the leaves that received
/// contributions (and once more for each order of derivatives that uses it, see [Note: directions]); release() before it, or, if the
/// gradients are deferred, in the backward that they belong to.
class LeafGroup {
 public:
  virtual ~LeafGroup() = default;
  /// The leaf's value ready for compute; gathers (and records that) if needed.
  virtual Tensor value(int index) = 0;
  /// Uninitialized memory for the leaf's gradient in the slots, of the dual of the value's type.
  virtual Tensor slot(int index) = 0;
  /// Whether a gradient of that type may be stored into the leaf's slot before a backward begins: the slots are not in use yet.
  virtual bool accepts_early_gradient(int /*index*/, const Type& /*gradient*/) const { return false; }
  /// The slots' contents are no longer needed.
  virtual void drop_slots() {}
  /// A backward has failed behind this group's finish(): gradients contain a part of it.
  virtual void backward_failed() {}
  /// Separate memory of the slot's type, for a gradient that has to wait before it may be stored there.
  virtual Tensor memory_like_slot(int index) = 0;
  /// No derivative of this backward reads the values any more.
  virtual void release() = 0;
  /// The same for a group that was opened for its values alone: no finish() follows.
  virtual void release_values() = 0;
  virtual void finish(const std::vector<bool>& contributed) = 0;
  virtual int num_leaves() const = 0;
  virtual bool trainable(int index) const = 0;
  /// Changes when the leaves' values do: a backward over values that an optimizer step has replaced is an error.
  virtual uint64_t version() const = 0;
  virtual const std::string& group_name() const = 0;
  /// A gradient(), which does not use the slots, has passed the group's first use: values opened for it may be closed.
  virtual void release_after_gradient() {}
  /// Every group of this backward is finished: waits for reductions still in flight.
  virtual void backward_ended() = 0;
  /// A backward begins: of the units that the forward has left open only those that are read soon stay open.
  virtual void backward_begins() {}
  /// The recording with this serial is over: closes what is still open. Gradients of a recording around it stay.
  virtual void recording_ended(uint64_t recording) = 0;
  /// The leaves' values are about to change: closes everything derived from them.
  virtual void close_for_change() = 0;
  /// A backward has left gradients here, for a step that is still to come.
  virtual bool holds_gradients() const = 0;
};

/// A direction in parameter space: for a leaf of a group a value of the leaf's shape and placement; undefined: 0.
using Direction = std::function<Tensor(const LeafGroup& group, int leaf)>;

/// store_into() and add_into() for a slot; they also accept gradients of other floating dtypes, and any layout that adds up to the
/// slot's.
void store_gradient(const Tensor& slot, const Tensor& gradient);
void add_gradient(const Tensor& slot, const Tensor& gradient);

}  // namespace sheaf
