// An asynchronous redistribution: two nodes, so that other nodes are computed while it is in flight:
//
//   %8 = reduce_scatter %7     starts it; nothing waits
//   ...
//   %9 = wait %8, %7           compute waits here; what was lent to the lane comes back
//
// Each of the two is the other's adjoint: the gradient's redistribution starts where the value was waited for, and is waited for where
// the value's started. So the backward overlaps where the forward did.
#pragma once

#include "sheaf/autograd/tape.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

struct OpDef;

/// A redistribution in flight. `value` has the type of the result, and is for wait() alone: its bytes are in the order of the wire.
struct PendingRedistribute {
  Layout from = {};
  Tensor lent = {};   ///< what the lane reads until then; undefined where it reads `value` itself
  Tensor value = {};  // goes first and waits for its lane
  explicit operator bool() const { return value.defined(); }
};

/// Whether a value goes from one layout to the other by one collective.
bool can_start_redistribute(const Layout& from, const Layout& to);
/// Starts redistribute(x, to), which can_start_redistribute(). Every rank of the axis calls it in the same order.
PendingRedistribute start_redistribute(const Tensor& x, const Layout& to);
/// Its result, redistribute(x, to); once.
Tensor wait(const PendingRedistribute& pending);

const OpDef& start_op();
/// The value that `v` is the redistribution of, if that is in flight or was waited for; else -1.
ValueId redistributed_from(const Tape& tape, ValueId v);

}  // namespace sheaf
