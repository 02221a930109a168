// A rank's GPU over the CUDA runtime, or over the emulation.
#pragma once

#include <memory>

#include "sheaf/core/gpu.h"

namespace sheaf::kernels::cuda {

/// GPU `index` of this process, with a stream and an allocator of its own: several ranks of one
/// process may share a device. Throws CudaError; only in builds with kHasCuda.
std::shared_ptr<Gpu> make_gpu(int index);

/// An allocator whose blocks may belong to graphs.
class GraphAllocator : public Allocator {
 public:
  /// What is allocated between here and end_capture() belongs to a graph while the result of end_capture() lives:
  /// nobody else gets it meanwhile, even if it was freed.
  virtual void begin_capture() = 0;
  virtual std::shared_ptr<void> end_capture() = 0;
};

/// A caching allocator of device memory for blocks that are used in the order of one stream: best
/// fit over one range of addresses, blocks split and merged. The range grows when no free block fits, by what is
/// missing at its end, and never shrinks, so nothing is requested from the device after the first training step.
/// Wire and landing blocks are in separate pieces of memory once there is a source of them (Gpu::set_wire).
/// OutOfMemory names what was asked for, what is in use and what the device has. Blocks are 256-byte aligned.
class DeviceAllocator : public GraphAllocator {
 public:
  virtual bool holds(const void* address) const = 0;
  virtual void set_wire(std::shared_ptr<PieceSource> source) = 0;
  virtual std::vector<MemoryPiece> wire_pieces(size_t known = 0) const = 0;
};
std::shared_ptr<DeviceAllocator> make_device_allocator(int device);

/// Page-locked memory of the host, for blocks that are used in the order of one stream: see
/// Gpu::host_memory(). OutOfMemory names what was asked for and what is in use.
std::shared_ptr<GraphAllocator> make_pinned_allocator(int device);

}  // namespace sheaf::kernels::cuda
