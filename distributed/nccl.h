// NCCL, as NcclCommunicator needs it: one communicator of NCCL's and the stream that its work
// runs on. Implemented by nccl.cc over libnccl, and in tests by ranks that are threads.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "sheaf/core/communicator.h"
#include "sheaf/core/gpu.h"

namespace sheaf {

/// Nothing here waits for a peer: long operations continue after the call, and state() is busy until they are done; make the next
/// call only then. Only abort() may block. Functions throw CommError with NCCL's message. abort() and state() may be called from any
/// thread, the others from one at a time.
class NcclComm {
 public:
  /// Destroys what was finalized, aborts what was not.
  virtual ~NcclComm() = default;

  virtual const Stream& stream() const = 0;
  /// An event for everything enqueued so far.
  virtual Event record() = 0;

  /// Enqueues the functions below that `calls` calls as one group; every rank makes the same calls.
  virtual void group(const std::function<void()>& calls) = 0;
  virtual void all_gather(const void* in, void* out, int64_t bytes_each) = 0;
  virtual void broadcast(const void* in, void* out, int64_t bytes, int root) = 0;
  virtual void all_reduce(const void* in, void* out, int64_t count, DType dtype,
                          Reduction reduction) = 0;
  virtual void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                      int root) = 0;
  virtual void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype,
                              Reduction reduction) = 0;
  virtual void send(const void* data, int64_t bytes, int peer) = 0;
  virtual void receive(void* data, int64_t bytes, int peer) = 0;

  /// Registers memory that calls will read or write: a whole piece of NcclLibrary::memory(). Does not wait for peers; state() must be
  /// ready. The result is for deregister_memory(), and may be null.
  virtual void* register_memory(void* base, int64_t bytes) = 0;
  /// No pending call may use the piece.
  virtual void deregister_memory(void* registration) = 0;

  enum class State : uint8_t { ready, busy, failed };
  /// `why` receives NCCL's message for a failure.
  virtual State state(std::string& why) = 0;
  /// Flushes enqueued work; only the destructor may follow.
  virtual void finalize() = 0;
  /// Ends kernels that wait for peers: their outputs are undefined. From then on state() is failed, and nothing else works. Returns
  /// when the graphs that hold calls are gone; only the first call has an effect.
  virtual void abort() = 0;
};

class NcclLibrary {
 public:
  virtual ~NcclLibrary() = default;
  /// The id by which the members of one communicator find each other: created by one of them, sent to all.
  virtual std::string unique_id() = 0;
  /// Member `rank` of `size`, on the GPU of the current rank; no two members on one GPU. `name` is
  /// for NCCL's logs.
  virtual std::unique_ptr<NcclComm> join(const std::string& id, int size, int rank,
                                         const std::string& name) = 0;
  /// Memory that can be registered with communicators.
  virtual std::shared_ptr<PieceSource> memory() = 0;
};

/// libnccl, loaded by the first call. ConfigError if it is missing, or the build has none, such as emulated builds;
/// only in builds with kHasCuda.
NcclLibrary& nccl_library();

}  // namespace sheaf
