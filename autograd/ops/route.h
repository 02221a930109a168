// The way from one layout to another: each step changes the placement on one mesh axis.
#pragma once

#include <vector>

#include "sheaf/core/placement.h"

namespace sheaf {

/// The layouts after each step, the last one `to`; empty if there is nothing to do. A value without a mesh is whole on that of
/// `to`, which is a step if nothing else is. The same on every rank: it depends on nothing but the layouts.
std::vector<Layout> route(const Layout& from, const Layout& to);

/// Whether a value that is whole on mesh axis `axis` can be cut there by `p` without communication: not if a later axis
/// cuts the same dimension already, for axes cut a dimension in their order.
bool can_slice(const Layout& l, int axis, const Placement& p);

}  // namespace sheaf
