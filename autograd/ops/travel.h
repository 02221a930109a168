// A redistribution in two nodes, so that others can be computed while it travels:
//
//   %8 = reduce_scatter %7     as ever, but nobody waits
//   ...
//   %9 = arrived %8, %7        what computes waits here; what was lent to the lane comes back
//
// Each half is the other's adjoint: where a value was waited for its gradient departs, and where it departed that is waited for. So a
// backward goes on beside what travels where the forward did.
#pragma once

#include "sheaf/autograd/tape.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

struct OpDef;

/// On its way. `value` has the type that it will have, and is for arrived() alone: its bytes are in the order of the wire.
struct Travelling {
  Layout from = {};
  Tensor lent = {};   ///< what the lane reads until then; undefined where it reads `value` itself
  Tensor value = {};  // goes first and waits for its lane
  explicit operator bool() const { return value.defined(); }
};

/// Whether a value goes from one layout to the other by one collective.
bool can_travel(const Layout& from, const Layout& to);
/// The first half of redistribute(x, to), which can_travel(). Every rank of the axis calls it in the same order.
Travelling start_redistribute(const Tensor& x, const Layout& to);
/// The second, once: redistribute(x, to).
Tensor arrived(const Travelling& travelling);

const OpDef& start_op();
/// Of the output of a node: where it comes from, if it is what travels, or has arrived; else -1.
ValueId departed(const Tape& tape, ValueId v);

}  // namespace sheaf
