// A rank's GPU, over the CUDA runtime or the emulation.
#pragma once

#include <memory>

#include "sheaf/core/gpu.h"

namespace sheaf::kernels::cuda {

/// GPU `index` of this process, with its own stream and allocator: several ranks of one process may share a device. Throws CudaError;
/// only in builds with kHasCuda.
std::shared_ptr<Gpu> make_gpu(int index);

/// An allocator whose blocks may belong to graphs.
class GraphAllocator : public Allocator {
 public:
  /// Memory allocated between here and end_capture() belongs to a graph while the result of end_capture() lives: it is not handed out
  /// again meanwhile, even if it was freed.
  virtual void begin_capture() = 0;
  virtual std::shared_ptr<void> end_capture() = 0;
};

/// A caching allocator of device memory for blocks that are used in the order of one stream: best fit over one range of addresses,
/// blocks split and merged. The range grows when no free block fits, by what is missing at its end, and never shrinks, so nothing is
/// requested from the device after the first training step. Wire and landing blocks are in separate pieces of memory once there is a
/// source of them (Gpu::set_wire). Where the driver cannot map memory (some virtual GPUs), all blocks are in pieces, and a warning says
/// so. OutOfMemory reports the request, the memory in use and the device's memory. Blocks are 256-byte aligned.
class DeviceAllocator : public GraphAllocator {
 public:
  virtual bool holds(const void* address) const = 0;
  virtual void set_wire(std::shared_ptr<PieceSource> source) = 0;
  virtual std::vector<MemoryPiece> wire_pieces(size_t known = 0) const = 0;
};
/// With can_map false: as where the driver cannot map memory.
std::shared_ptr<DeviceAllocator> make_device_allocator(int device, bool can_map = true);

/// Page-locked host memory, for blocks that are used in the order of one stream: see Gpu::host_memory(). OutOfMemory reports the
/// request and the memory in use.
std::shared_ptr<GraphAllocator> make_pinned_allocator(int device);

}  // namespace sheaf::kernels::cuda
