// What a recording sees of a unit of parameters: their values, and where their gradients belong.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf {

/// Leaves that are gathered, reduced and updated together: a unit of parameters. Implemented by distributed/.
///
/// [Note: slots] The gradients of a group's leaves live in one buffer, its slots, which is what the reduction sends. The
/// first contribution of a backward is stored there by the kernel that computes it (or was in the forward, see [Note: early
/// gradients]), later ones are added. finish() is called once per backward, when the reverse pass has left the group's first use behind,
/// with what was contributed (and once more for each order of derivatives that uses it, see [Note: directions]); pass() before it, or in the backward
/// of which the gradients come later.
class LeafGroup {
 public:
  virtual ~LeafGroup() = default;
  /// The leaf's value ready for compute; gathers (and records that) if needed.
  virtual Tensor value(int index) = 0;
  /// Uninitialised memory of the leaf's gradient in the slots, of the dual of the value's type.
  virtual Tensor slot(int index) = 0;
  /// Whether a gradient of that type may be put into the leaf's slot before there is a backward: nobody uses the slots yet.
  virtual bool accepts_early_gradient(int /*index*/, const Type& /*gradient*/) const { return false; }
  /// Nothing that is in the slots is wanted.
  virtual void drop_slots() {}
  /// Memory of its own of the slot's type, for a gradient that waits until it may go there.
  virtual Tensor memory_like_slot(int index) = 0;
  /// No derivative of this backward reads the values any more.
  virtual void pass() = 0;
  /// The same of what was opened for values alone: no finish() follows.
  virtual void pass_constant() = 0;
  virtual void finish(const std::vector<bool>& contributed) = 0;
  virtual int num_leaves() const = 0;
  virtual bool trainable(int index) const = 0;
  /// Changes when the leaves' values do: a backward over values that a step has replaced is an error.
  virtual uint64_t version() const = 0;
  virtual const std::string& group_name() const = 0;
  /// A gradient(), which leaves the slots alone, has left the group's first use behind: what was opened for it may close.
  virtual void gradient_passed() {}
  /// Every group of this backward is finished: reductions still under way come to their end.
  virtual void backward_ended() = 0;
  /// A backward begins: of what the forward has left open only what is read soon stays.
  virtual void backward_begins() {}
  /// The recording is over: what was still open closes.
  virtual void recording_ended() = 0;
  /// The leaves' values are about to change: what was made of them closes.
  virtual void close_for_change() = 0;
  /// A backward has left gradients here, for a step that has not come yet.
  virtual bool holds_gradients() const = 0;
};

/// A direction in the space of parameters: for a leaf of a group a value of its shape, placed as the leaf's is; undefined: 0.
using Direction = std::function<Tensor(const LeafGroup& group, int leaf)>;

/// store_into() and add_into() for a slot, which takes gradients in other floating dtypes, too, and any that adds up to its layout.
void store_gradient(const Tensor& slot, const Tensor& gradient);
void add_gradient(const Tensor& slot, const Tensor& gradient);

}  // namespace sheaf
