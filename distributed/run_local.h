// run_local: N ranks as threads of this process.
#pragma once

#include <functional>

#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/world.h"

namespace sheaf {

/// Runs `body` as `ranks` ranks, each on a thread with its own RankContext (and so its own allocators), and returns when all have
/// finished. If ranks throw, the others' communicators fail at once, and the first failure that did not merely follow from another is
/// rethrown here.
void run_local(int ranks, const std::function<void(World&)>& body, LocalOptions options = {});

}  // namespace sheaf
