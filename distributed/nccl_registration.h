// NcclRegistration: the part of a rank's memory that is registered with one NCCL communicator.
//
// [Note: registered buffers] NCCL copies unregistered memory into its own buffers and out of them. Memory that every member of a
// communicator has registered is transferred in place, on fewer multiprocessors: over NVLink SHARP if available, else between peers'
// memories. Registered memory must be memory that peers can be given a handle to, whole allocations of ncclMemAlloc, and a buffer
// must not span two of them. So the buffers that units gather and reduce are in a pool of such pieces (MemoryKind;
// kernels/cuda/piece_pool.h), which grows by pieces and never releases one. A communicator registers new pieces before the first call
// that can use them; after the second step of a training run there are none.
//
// Members may not mix: a call whose buffer one has registered and another has not may hang. The op determines which buffers are in
// the pool, so it is the same on all ranks; whether anything is registered at all is decided when they connect: if one cannot, none
// does, and the first that cannot says why. Offsets need not be equal for a result to be right: NCCL compares those of the ranks of a
// node before it uses NVLink SHARP (and copies if they differ), and peers tell each other their addresses. They are equal, though, as
// long as all ranks allocate in the same order.
//
// Why not symmetric windows (ncclCommWindowRegister, NCCL 2.27)? With them each rank computes the addresses of its peers' buffers
// from its own offset, unchecked: if one rank freed a block a moment later, so that blocks were placed elsewhere from then on,
// results would be silently wrong. Also, registering a window is a collective, but pieces are created whenever a rank's step first
// needs them.
//
// The pool's memory has no other use, so gradients that live until the optimizer has run are not in it: their memory would be idle
// during the peak of the activations. For a reduce-scatter's output nothing is lost within a node, where NCCL only needs its input
// registered. With strategy replicate, gradients are summed in place and pass through NCCL's buffers: in the pool they would cost 4
// bytes per parameter.
//
// Based on NCCL's documents and sources, 2.26 to 2.30; tested only over stand-ins.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/gpu.h"
#include "sheaf/distributed/nccl.h"

namespace sheaf {

/// With SHEAF_NCCL_REGISTER=1 makes the wire memory of the current rank's GPU registrable, unless the GPU has none of that kind.
/// Call it before anything is allocated there.
void use_nccl_memory(NcclLibrary& library);

/// Belongs to the thread that makes the communicator's calls.
class NcclRegistration {
 public:
  /// Collective: `host` has the same members. Registers existing pieces, or decides that nothing will ever be registered.
  NcclRegistration(NcclComm& comm, std::shared_ptr<Gpu> gpu, Communicator& host, const std::string& name);
  /// Before a call: registers the pieces that the pool has gained. The pool never shrinks, so every buffer allocated before this is
  /// registered afterwards. CommError.
  void catch_up();
  /// Call it when no call is pending, before the communicator ends, unless that was aborted: then NCCL forgets its registrations.
  void end();

 private:
  NcclComm& comm_;
  const std::shared_ptr<Gpu> gpu_;
  bool on_ = true;
  std::vector<void*> registrations_;
};

}  // namespace sheaf
