// Communicator: rank, size and the collectives of one group of ranks, on one lane.
//
// Every call enqueues on the communicator's own thread and returns at once (but see next_call_is_awaited()); calls run in the order they
// were made, and the returned Event completes when the buffers may be read or reused. Buffers belong to the caller and must live
// until then. Communicators never allocate memory for values: the memory they need in addition to the caller's buffers is `staging_bytes`,
// a block that is fixed at construction.
//
// Sums are computed in rank order, ((x0 + x1) + x2) + ..., each element on the rank that owns it, in f32 for f32, bf16 and f16
// (rounded once at the end), in f64 for f64, exactly for integers: the same bits at every call and for every algorithm. Only NCCL
// uses its own order.
//
// A failure (peer lost, time-out, disagreement) poisons the communicator: the event rethrows it, and so does every
// later call. Errors name rank, op, sequence number, module path and the ranks that are missing.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "sheaf/core/dtype.h"
#include "sheaf/core/event.h"

namespace sheaf {

enum class Reduction : uint8_t { sum, max, min };

/// First element of rank `r`'s slice when `count` elements are cut evenly over `ranks`; slice r ends where r + 1 begins.
inline int64_t even_cut(int64_t count, int64_t r, int64_t ranks) { return count * r / ranks; }

/// An all_reduce of at most this many bytes is sent whole to every rank, in one round; a larger one is a reduce_scatter and an
/// all_gather of even slices. Both give the same bits.
inline constexpr int64_t kSmallAllReduceBytes = 4096;
/// Payload bytes that `rank` of `ranks` receives in an all_reduce of `elements` elements of `size` bytes.
inline int64_t all_reduce_bytes(int64_t elements, int64_t size, int64_t rank, int64_t ranks) {
  const int64_t own = even_cut(elements, rank + 1, ranks) - even_cut(elements, rank, ranks);
  return (elements * size <= kSmallAllReduceBytes ? elements * (ranks - 1) : own * (ranks - 1) + elements - own) * size;
}

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view kind() const = 0;  ///< "local", "shm", "gloo", "nccl", "simulated"
  /// True if calls on GPU memory can be part of a graph (core/gpu.h): they only enqueue, and peers that replay
  /// their graphs meet again.
  virtual bool can_be_captured() const { return size() == 1; }

  /// The next call also waits for `event`: another lane of this rank fills its buffers. The default waits for it at once;
  /// communicators that enqueue on a GPU make their lane wait.
  virtual void wait_before_next_call(const Event& event) { event.sync(); }
  /// The rank has nothing to do until the next call is done: if the lane is idle, the call may run on the calling thread, which saves
  /// waking two threads. Then the call itself throws its errors.
  virtual void next_call_is_awaited() {}
  /// The next call has no deadline: other ranks may be busy for any time before they call it, with a disk for instance. Ranks that fail
  /// or leave are noticed all the same, and those whose process gives no sign of life.
  virtual void next_call_has_no_deadline() {}
  /// The next call communicates these values, "f32[4,3] Partial@data to Invariant@data": it fails if other ranks' calls communicate
  /// different ones, even if counts are the same.
  virtual void label_next_call(std::string /*values*/) {}
  /// True if calls on host memory are copied by the ranks' own cores, which gain nothing by copying while they compute.
  virtual bool takes_own_cores() const { return false; }

  /// Every rank's `in` (counts[rank()] elements), concatenated in rank order into `out` on every rank. `in` may be its
  /// own segment inside `out` (in-place gather).
  ///    rank 0: a     rank 0: a b c
  ///    rank 1: b  →  rank 1: a b c        adjoint: reduce_scatter
  ///    rank 2: c     rank 2: a b c
  virtual Event all_gather(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                           std::string_view path) = 0;

  /// `in` holds sum(counts) elements on every rank; rank r receives the sum over ranks of segment r (counts[r]
  /// elements) in `out`. `out` may be its own segment inside `in`.
  ///    rank 0: a0 b0 c0     rank 0: a0+a1+a2
  ///    rank 1: a1 b1 c1  →  rank 1: b0+b1+b2        adjoint: all_gather
  ///    rank 2: a2 b2 c2     rank 2: c0+c1+c2
  virtual Event reduce_scatter(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                               std::string_view path) = 0;

  /// `data` becomes the reduction over all ranks, in place. Sums run in rank order, as above.
  virtual Event all_reduce(void* data, int64_t count, DType dtype, Reduction reduction, std::string_view path) = 0;

  /// Segment s of `in` (send_counts[s] elements) is sent to rank s; `out` receives rank s's segment for us at position s
  /// (recv_counts[s] elements).
  virtual Event all_to_all(const void* in, std::span<const int64_t> send_counts, void* out,
                           std::span<const int64_t> recv_counts, DType dtype, std::string_view path) = 0;

  /// Sends `bytes` bytes of rank `root` to every rank, in place.
  virtual Event broadcast(void* data, int64_t bytes, int root, std::string_view path) = 0;

  virtual Event barrier(std::string_view path) = 0;

  /// Makes every rank of this communicator fail at once with `reason`, which names this rank. Safe from any thread.
  virtual void abort(const std::string& reason) = 0;

  /// Bytes of staging this communicator holds, charged to the rank's allocator for its whole life.
  virtual int64_t staging_bytes() const = 0;

  /// Collectives issued so far and a running hash of (op, dtype, counts, path, values): equal on all ranks of the group.
  virtual uint64_t sequence() const = 0;
  virtual uint64_t fingerprint() const = 0;
  /// Payload bytes this rank has received in collectives so far.
  virtual int64_t bytes_received() const = 0;
};

}  // namespace sheaf
