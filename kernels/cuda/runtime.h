// The GPU runtime functions that Sheaf needs in addition to kernels: memory, streams, events, copies. Implemented by runtime.cc over
// the CUDA runtime, and by emulation.cc, which runs the same kernel sources on a CPU (see emulation.h).
//
// All functions throw CudaError naming the call, or OutOfMemory; those that free memory or destroy an event throw only for invalid
// arguments, not for failures of earlier work, so that they may be used in destructors. None is called in a build without either
// (config.h, kHasCuda).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "sheaf/core/device.h"

namespace sheaf::kernels::cuda {

/// GPUs that this process may use; 0 if there is no driver.
int device_count();
/// Why device_count() is 0: the driver's message.
std::string why_no_device();
/// "NVIDIA H200", or "emulated GPU" if kernels run on the CPU.
std::string device_name(int device);
/// Equal for the same GPU in all processes of a host, and different for different GPUs.
std::string device_identity(int device);
/// 90 for 9.0.
int compute_capability(int device);
/// Shared memory, in bytes, that a block can have if its kernel asks for it.
int64_t block_shared_bytes(int device);
/// What some kernels ask for: all that Hopper has.
inline constexpr size_t kBlocksSharedBytes = 227 << 10;
int multiprocessors(int device);
/// Makes `device` current for this thread's calls and launches.
void use_device(int device);

/// Memory of the current device, 256-byte aligned; throws OutOfMemory with the free and the total
/// size.
void* allocate(size_t bytes);
/// No work may use it any more: CUDA does not promise to wait for kernels that do.
void free(void* memory);

/// A range of device addresses that grows: `reserve` takes only addresses, `map` backs the next `bytes` of them
/// with memory (a multiple of map_granularity()); false if the device has no more. release() frees the range.
struct DeviceRange {
  char* base = nullptr;
  size_t reserved = 0, mapped = 0;
};
size_t map_granularity(int device);
DeviceRange reserve(int device, size_t bytes);
bool map(int device, DeviceRange& range, size_t bytes);
void release(DeviceRange& range);
/// Bytes of the current device: free and total.
struct DeviceMemoryInfo {
  size_t free, total;
};
DeviceMemoryInfo memory_info();

/// Page-locked host memory, for copies that run concurrently with the host.
void* allocate_pinned(size_t bytes);
void free_pinned(void* memory);

/// Which stream's blocks are scheduled first.
enum class Priority : uint8_t { low, normal, high };
/// A stream of the current device that never waits for the default stream.
Stream make_stream(int device, Priority priority = Priority::normal);
void destroy_stream(const Stream& stream);
/// Blocks the host until all work enqueued on the stream has run; rethrows its errors.
void synchronize(const Stream& stream);

/// A point in a stream's order.
using EventHandle = void*;
EventHandle make_event();
/// One that also records the time at which the device reaches it; costs a little more.
EventHandle make_timed_event();
void destroy_event(EventHandle event);
void record(EventHandle event, const Stream& stream);
/// Work enqueued on `stream` from now on runs after `event`.
void wait(const Stream& stream, EventHandle event);
void synchronize(EventHandle event);
bool reached(EventHandle event);
/// Between two timed events that were reached, by the device's clock (to half a microsecond).
double seconds_between(EventHandle begin, EventHandle end);

/// From now on work enqueued on `stream` is recorded and does not run; so is work enqueued on a stream that waits for an event of a
/// recording one. The host must not wait for such a stream or event.
///
/// CUDA's relaxed mode: ranks and their communication threads capture and enqueue concurrently, memory may be
/// mapped and code loaded meanwhile, and nothing here uses the default stream, against which the stricter modes
/// would guard.
void begin_capture(const Stream& stream);
using GraphHandle = void*;
/// Returns the work recorded since, ready to be launched; the recording ends on all its streams. Throws if an operation cannot be recorded,
/// or if `stream` was not ordered by an event after a stream that had joined.
GraphHandle end_capture(const Stream& stream);
bool capturing(const Stream& stream);
/// Enqueues all of a graph.
void launch_graph(GraphHandle graph, const Stream& stream);
/// Its launches must have finished.
void destroy_graph(GraphHandle graph);

enum class Copy : uint8_t { to_device, to_host, on_device };
/// Enqueues a copy. From or to host memory that is not pinned, the host waits until it is done.
void copy_bytes(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind);
/// Enqueues memset.
void fill_bytes(const Stream& stream, void* to, int byte, size_t bytes);

}  // namespace sheaf::kernels::cuda
