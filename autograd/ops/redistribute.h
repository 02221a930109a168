// Redistribution: the same value in another placement on one mesh axis. The only op that communicates besides units.
#pragma once

#include <string>

#include "sheaf/autograd/op.h"

namespace sheaf {

bool is_redistribute(const OpDef* op);
/// What a redistribution does: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "zero_embed",
/// "keep_on_one", "nothing".
std::string redistribution_name(const Layout& from, const Layout& to);
/// Whether a value that is whole on mesh axis `axis` can be cut there by `p` without communication: not if a later axis
/// cuts the same dimension already, for axes cut a dimension in their order.
bool can_slice(const Layout& l, int axis, const Placement& p);

}  // namespace sheaf
