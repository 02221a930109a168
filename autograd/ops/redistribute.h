// Redistribution: the same value in another placement on one mesh axis. The only op that communicates besides units.
#pragma once

#include <string>

#include "sheaf/autograd/op.h"

namespace sheaf {

bool is_redistribute(const OpDef* op);
/// What a redistribution does: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "slice", "zero_embed",
/// "keep_on_one", "nothing".
std::string redistribution_name(const Layout& from, const Layout& to);

/// From one rank of a chain to its neighbour; see send.cc.
const OpDef& send_op();
struct SendAttrs {
  Layout to;
  int32_t axis;
  bool operator==(const SendAttrs&) const = default;
};
/// Whether a value moves from one placement to the other between neighbours alone.
bool is_send(const MeshSpec& mesh, int axis, const Placement& from, const Placement& to);
/// On the rank that sends: `sent` is what send_op() made of `x`, which the lane reads until a later micro-batch or backward
/// sends the same way, or until the recording's last backward is done. Outside of a recording it is waited for.
void lend_until_sent(const Tensor& x, const Tensor& sent, int axis);

/// Whether gradients placed as `g` are addends of one placed as `want`: placed alike, or on one rank where `want` is Partial.
bool adds_up_to(const Layout& g, const Layout& want);

namespace detail {
/// Law A.
void adjoint_of_redistribution(Vjp& c);
}  // namespace detail

}  // namespace sheaf
