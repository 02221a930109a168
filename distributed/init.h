// init_from_env: the World that a launcher made.
#pragma once

#include "sheaf/distributed/world.h"

namespace sheaf::distributed {

/// Joins the job that the environment describes (see rendezvous.h for the variables): over Gloo, or a world of one
/// without a launcher. Returns when all ranks are connected. The World uses the calling thread's RankContext and sets
/// its threads. ConfigError for wrong or missing variables, CommError for a time-out (kTimeout) or a peer that died
/// meanwhile.
World init_from_env();

}  // namespace sheaf::distributed
