// Collectives as calls of NCCL's functions.
#pragma once

#include "sheaf/distributed/collective.h"
#include "sheaf/distributed/nccl.h"

namespace sheaf {

/// ConfigError for what NCCL cannot do: reductions of u16.
void check_nccl_can(const Collective& call);
/// Makes the calls of member `rank` of `size`, inside a group() of `comm`. Slices of unequal sizes become broadcasts, or reductions,
/// one for each rank.
void call_nccl(NcclComm& comm, const Collective& call, int size, int rank);

}  // namespace sheaf
