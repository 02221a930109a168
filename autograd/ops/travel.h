// A redistribution in two nodes, so that others can be computed while it is in flight:
//
//   %8 = reduce_scatter %7     as usual, but nothing waits for it
//   ...
//   %9 = arrived %8, %7        compute waits here; the buffer lent to the lane is returned
//
// Each half is the other's adjoint: the vjp of `arrived` starts the gradient's redistribution, that of the start waits for it. So the
// backward overlaps communication where the forward did.
#pragma once

#include "sheaf/autograd/tape.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

struct OpDef;

/// A value in flight. `value` has its final type, and is for arrived() alone: its bytes are in the order of the transfer.
struct Travelling {
  Layout from = {};
  Tensor lent = {};   ///< what the lane reads until then; undefined if it reads `value` itself
  Tensor value = {};  // destroyed first, which waits for its lane
  explicit operator bool() const { return value.defined(); }
};

/// Whether a value gets from one layout to the other by one collective.
bool can_travel(const Layout& from, const Layout& to);
/// The first half of redistribute(x, to), for layouts that can_travel(). Every rank of the axis calls it in the same order.
Travelling start_redistribute(const Tensor& x, const Layout& to);
/// The second half, to be called once: returns redistribute(x, to).
Tensor arrived(const Travelling& travelling);

const OpDef& start_op();
/// For the output of either node: the value that was redistributed; for other values -1.
ValueId departed(const Tape& tape, ValueId v);

}  // namespace sheaf
