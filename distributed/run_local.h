// run_local: N ranks as threads of this process.
#pragma once

#include <functional>

#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/world.h"

namespace sheaf {

/// Runs `body` as `ranks` ranks, each on a thread with a RankContext (and so with allocators) of its own, and returns
/// when all have finished. If ranks throw, the others' communicators fail at once, and the first failure, not one that
/// merely followed from it, is rethrown here.
void run_local(int ranks, const std::function<void(World&)>& body, LocalOptions options = {});

}  // namespace sheaf
