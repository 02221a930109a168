// NcclRegistration: which of the rank's memory one communicator of NCCL's has been told of.
//
// [Note: registered buffers] What NCCL does not know it copies into buffers of its own and out of them. What every
// member of a communicator has registered it moves in place, on fewer multiprocessors: over NVLink SHARP where there is
// such, else between peers' memories. It must be told of memory that peers can be given a handle to, whole allocations
// of ncclMemAlloc, and a buffer must not reach from one into the next. So what units gather and reduce lies in a pool
// of such pieces (MemoryKind; kernels/cuda/wire_pool.h), which grows by pieces and never gives one back. A communicator
// registers new pieces before the first call that can move them; after the second step of a training run there are
// none.
//
// Members may not mix: a call whose buffer one has registered and another has not may hang. What lies in the pool is a
// matter of the op, so it is the same on all ranks; and whether anything is registered at all they settle when they
// connect: if one cannot, nobody does, and the first of those says why. Offsets need not be equal for a result to be
// right: NCCL compares those of the ranks of a node before it uses NVLink SHARP (and copies where they differ), and
// peers tell each other their addresses. They are equal, though, as long as all ranks allocate in the same order.
//
// Why not symmetric windows (ncclCommWindowRegister, NCCL 2.27)? There each rank computes the addresses of its peers'
// buffers from its own offset, and nobody checks: a block that was freed a moment later on one rank, and thus landed
// elsewhere from then on, would be a wrong result that nobody sees. Also, to register one is a collective of its own,
// and pieces come when a rank's step first asks for them.
//
// Memory of the pool serves nothing else, so gradients that live on until the optimizer has run are not in it; they
// would lie idle under the peak of the activations. For what a reduce-scatter puts out nothing is lost within a node,
// where NCCL wants to know only of what is reduced. Strategy replicate, whose gradients are summed where they stay, is
// moved through NCCL's buffers: in the pool they would cost 4 bytes per parameter.
//
// Read in NCCL's documents and sources, 2.19 to 2.30, and run over stand-ins alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/gpu.h"
#include "sheaf/distributed/nccl.h"

namespace sheaf {

/// With SHEAF_NCCL_REGISTER=1 makes wire memory of the current rank's GPU such that can be registered, unless this NCCL
/// has none. Before anything is allocated there.
void use_nccl_memory(NcclLibrary& library);

/// Belongs to the thread that makes the communicator's calls.
class NcclRegistration {
 public:
  /// Collective: `host` has the same members. Registers what is there, or settles that nothing ever will be.
  NcclRegistration(NcclComm& comm, std::shared_ptr<Gpu> gpu, Communicator& host, const std::string& name);
  /// Before a call: registers what the pool has grown by. The pool never shrinks, so a buffer that was allocated before
  /// the call was made is known to NCCL after it. CommError.
  void catch_up();
  /// When no call is under way, and before the communicator ends, unless it was aborted: then NCCL forgets by itself.
  void end();

 private:
  NcclComm& comm_;
  const std::shared_ptr<Gpu> gpu_;
  bool on_ = true;
  std::vector<void*> registrations_;
};

}  // namespace sheaf
