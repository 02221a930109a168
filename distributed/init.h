// init_from_env: the World that a launcher made.
#pragma once

#include "sheaf/distributed/world.h"

namespace sheaf::distributed {

/// Joins the job that the environment describes (see rendezvous.h for the variables), or is a world of one without a launcher. Groups
/// of ranks on one host communicate through shared memory, those across hosts over Gloo (TCP); SHEAF_COMM=shm or gloo selects one of
/// them for all; shm where it is impossible is a ConfigError on all ranks. The World's device is a GPU if there is one, or as
/// SHEAF_DEVICE says (device_choice.h). Returns when all ranks are connected. The World uses the calling thread's RankContext and
/// sets its threads and GPU. ConfigError for wrong or missing variables, CommError for a time-out (kTimeout) or a peer that died
/// meanwhile.
World init_from_env();

/// For a process that belongs to no job: chooses its device as init_from_env does and gives the calling thread's
/// RankContext its GPU.
Device init_device();

}  // namespace sheaf::distributed
