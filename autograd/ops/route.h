// The route from one layout to another: each step changes the placement on one mesh axis.
#pragma once

#include <vector>

#include "sheaf/core/placement.h"

namespace sheaf {

/// The layouts after each step, the last one `to`; empty if nothing has to change. A value without a mesh counts as whole on that of
/// `to`, which is one step if nothing else changes. The same on every rank: it depends on the layouts alone.
std::vector<Layout> route(const Layout& from, const Layout& to);

/// Whether a value that is whole on mesh axis `axis` can be sharded there by `p` without communication: not if a later axis already
/// shards the same dimension, since axes shard a dimension in mesh order.
bool can_slice(const Layout& l, int axis, const Placement& p);

}  // namespace sheaf
