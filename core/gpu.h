// Gpu: a rank's GPU, as core sees it: memory, the stream that its ops run on, copies, points in a stream's order.
// Implemented in kernels/cuda/gpu.cc; RankContext::gpu holds it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/allocator.h"
#include "sheaf/core/device.h"
#include "sheaf/core/event.h"

namespace sheaf {

/// Captured work: replay() runs all of it again, on the same memory. Belongs to its Gpu's rank.
class GpuGraph {
 public:
  virtual ~GpuGraph() = default;
  /// Enqueues it on compute().
  virtual void replay() = 0;
};

/// The time at which a stream reached a point in its order, by its device's clock.
class DeviceTime {
 public:
  virtual ~DeviceTime() = default;
  /// Seconds since `earlier`, of the same Gpu; blocks the host until both are reached. A float's precision: steps of 2 µs after 16
  /// s.
  virtual double since(const DeviceTime& earlier) const = 0;
};

/// A source of pieces of device memory that other processes can access too: ncclMemAlloc's.
class PieceSource {
 public:
  virtual ~PieceSource() = default;
  /// A piece on GPU `device` of this process, aligned to 256 bytes; null if there is no more.
  virtual void* allocate(int device, size_t bytes) = 0;
  virtual void free(void* piece) = 0;
};

struct MemoryPiece {
  void* base;
  size_t bytes;
};

class Gpu {
 public:
  virtual ~Gpu() = default;
  virtual Device device() const = 0;
  virtual std::string name() const = 0;  ///< "NVIDIA H200"

  /// Memory ordered by compute(): a block that was freed while kernels enqueued there still use it may be handed out again at once,
  /// since its next writer comes later in that order. Events put work on other streams into that order before its memory is freed.
  virtual const std::shared_ptr<Allocator>& memory() const = 0;
  /// Page-locked memory of the host (MemoryKind::host), which kernels read and write in place, in the same order. Its blocks are few
  /// and long-lived: a freed one is reused for the next request of its size, and returned to the system with the Gpu.
  virtual const std::shared_ptr<Allocator>& host_memory() const = 0;
  /// True for an address in memory().
  virtual bool holds(const void* address) const = 0;
  /// From now on wire and landing blocks (MemoryKind) are in pieces of `source`, each block inside one. The first piece
  /// is allocated at once: OutOfMemory if that fails. Only the first call counts.
  virtual void set_wire(std::shared_ptr<PieceSource> source) = 0;
  /// The pieces so far, without the first `known`. They live as long as the memory, and have the same order, sizes
  /// and blocks on all ranks that allocate and free such blocks in the same order. For any thread.
  virtual std::vector<MemoryPiece> wire_pieces(size_t known = 0) const = 0;
  /// The stream of this rank's ops.
  virtual const Stream& compute() const = 0;
  /// A stream for copies from and to host memory, concurrent with compute().
  virtual const Stream& copies() const = 0;
  /// One more, for copies to the host concurrent with copies() from it: the bus carries both directions at once.
  virtual const Stream& d2h() const = 0;
  /// Another stream of the same device, with priority over compute(): for communication.
  virtual Stream make_lane() = 0;
  virtual void destroy_lane(const Stream& lane) = 0;

  enum class Copy : uint8_t { to_device, to_host, on_device };
  /// Enqueues a copy; host memory may be reused when the call returns.
  virtual void copy(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) = 0;
  /// Blocks the host until everything enqueued on `stream` has run; throws its errors.
  virtual void sync(const Stream& stream) = 0;
  /// Everything enqueued on `stream` by now, as an event that another stream can be ordered after.
  virtual Event record(const Stream& stream) = 0;
  /// The time at which `stream` finishes the work enqueued by now. Never while capturing. For any thread.
  virtual std::shared_ptr<const DeviceTime> note_time(const Stream& stream) = 0;

  /// From here on, work enqueued on compute(), and on streams that events order after it, does not run but is recorded; memory
  /// allocated meanwhile belongs to the graph while it lives. At the end all these streams must be ordered before compute() again.
  /// Host and device cannot synchronize meanwhile: copies from and to the host, sync() and earlier events are errors. GpuCapture ends
  /// a capture that an exception leaves open.
  virtual void begin_capture() = 0;
  virtual std::unique_ptr<GpuGraph> end_capture() = 0;
  virtual void abandon_capture() noexcept = 0;
  virtual bool capturing() const = 0;
  /// While capturing: call `f` after each replay, with points of compute() before and after it. The last call of one
  /// `caller` counts.
  using Replayed = std::function<void(const Event& begun, const Event& done)>;
  virtual void at_replays(const void* caller, Replayed f) = 0;
};

/// A capture, for as long as the scope lives.
class GpuCapture {
 public:
  explicit GpuCapture(Gpu& gpu) : gpu_(gpu) { gpu_.begin_capture(); }
  ~GpuCapture() {
    if (gpu_.capturing()) gpu_.abandon_capture();
  }
  GpuCapture(const GpuCapture&) = delete;
  GpuCapture& operator=(const GpuCapture&) = delete;
  std::unique_ptr<GpuGraph> finish() { return gpu_.end_capture(); }

 private:
  Gpu& gpu_;
};

}  // namespace sheaf
