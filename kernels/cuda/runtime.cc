#include "sheaf/kernels/cuda/runtime.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda {
namespace {

void check_call(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail<CudaError>('[', call, "] ", cudaGetErrorString(error));
}

// Checks calls that free something. These also run while an error is handled, and after a fault of the device every call fails with
// that: the code that waited for the work reports it.
void check_given_back(cudaError_t error, const char* call) {
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle)
    check_call(error, call);
}

cudaStream_t handle_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

#define SHEAF_CUDA_CALL(function, ...) check_call(function(__VA_ARGS__), #function)
#define SHEAF_CUDA_GIVE_BACK(function, thing) check_given_back(function(thing), #function)

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? "the driver lists no device" : cudaGetErrorString(error);
}

std::string device_name(int device) {
  cudaDeviceProp properties;
  SHEAF_CUDA_CALL(cudaGetDeviceProperties, &properties, device);
  return properties.name;
}

std::string device_identity(int device) {
  cudaDeviceProp properties;
  SHEAF_CUDA_CALL(cudaGetDeviceProperties, &properties, device);
  std::string out;
  for (const char byte : properties.uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    out += kDigits[static_cast<unsigned char>(byte) >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

namespace {

int attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  SHEAF_CUDA_CALL(cudaDeviceGetAttribute, &value, what, device);
  return value;
}

}  // namespace

int compute_capability(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

int64_t block_shared_bytes(int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

int multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

void use_device(int device) { SHEAF_CUDA_CALL(cudaSetDevice, device); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (bytes == 0) return memory;  // CUDA does not specify the result for 0 bytes
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // a smaller request may succeed
    size_t free_bytes = 0, total = 0;
    SHEAF_CUDA_CALL(cudaMemGetInfo, &free_bytes, &total);
    fail<OutOfMemory>("[cudaMalloc] ", bytes, " bytes asked, ", free_bytes, " free of ", total,
                      " on the GPU");
  }
  check_call(error, "cudaMalloc");
  return memory;
}

namespace {

// The driver's functions for ranges; looked up, so that nothing links with libcuda.
template <class F>
F* driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  SHEAF_CUDA_CALL(cudaGetDriverEntryPointByVersion, name, &function, 12000, cudaEnableDefault,
                  &found);
  check<CudaError>(found == cudaDriverEntryPointSuccess && function, "[", name,
                   "] is not in this driver");
  return reinterpret_cast<F*>(function);
}
#define SHEAF_DRIVER(name) static auto* const name##_ = driver<decltype(name)>(#name)

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  SHEAF_DRIVER(cuGetErrorString);
  const char* words = nullptr;
  cuGetErrorString_(result, &words);
  fail<CudaError>('[', call, "] driver error ", static_cast<int>(result), ", ",
                  words ? words : "which it has no words for");
}

CUmemAllocationProp pinned_on(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return prop;
}

}  // namespace

size_t map_granularity(int device) {
  SHEAF_DRIVER(cuMemGetAllocationGranularity);
  const CUmemAllocationProp prop = pinned_on(device);
  size_t bytes = 0;
  check_driver(cuMemGetAllocationGranularity_(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  return bytes;
}

DeviceRange reserve(int device, size_t bytes) {
  SHEAF_DRIVER(cuMemAddressReserve);
  use_device(device);
  SHEAF_CUDA_CALL(cudaFree, nullptr);  // creates the context
  CUdeviceptr base = 0;
  check_driver(cuMemAddressReserve_(&base, bytes, 0, 0, 0), "cuMemAddressReserve");
  return {reinterpret_cast<char*>(base), bytes, 0};
}

bool map(int device, DeviceRange& range, size_t bytes) {
  SHEAF_DRIVER(cuMemCreate);
  SHEAF_DRIVER(cuMemMap);
  SHEAF_DRIVER(cuMemSetAccess);
  SHEAF_DRIVER(cuMemRelease);
  SHEAF_DRIVER(cuMemUnmap);
  if (range.mapped + bytes > range.reserved) return false;
  use_device(device);  // the driver's functions do not select one, and this thread may have none
  const CUmemAllocationProp prop = pinned_on(device);
  const CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle memory;
  const CUresult made = cuMemCreate_(&memory, bytes, &prop, 0);
  if (made == CUDA_ERROR_OUT_OF_MEMORY) return false;
  check_driver(made, "cuMemCreate");
  const auto at = reinterpret_cast<CUdeviceptr>(range.base + range.mapped);
  const CUresult mapped = cuMemMap_(at, bytes, 0, memory, 0);
  const CUresult kept = cuMemRelease_(memory);  // a mapping keeps it
  CUresult accessible = mapped;
  if (mapped == CUDA_SUCCESS && (accessible = cuMemSetAccess_(at, bytes, &access, 1)) != CUDA_SUCCESS)
    cuMemUnmap_(at, bytes);  // restores the range
  if (accessible == CUDA_ERROR_OUT_OF_MEMORY) return false;
  check_driver(mapped, "cuMemMap");
  check_driver(accessible, "cuMemSetAccess");
  range.mapped += bytes;
  check_driver(kept, "cuMemRelease");
  return true;
}

void release(DeviceRange& range) {
  SHEAF_DRIVER(cuMemUnmap);
  SHEAF_DRIVER(cuMemAddressFree);
  const auto base = reinterpret_cast<CUdeviceptr>(range.base);
  if (range.mapped) check_driver(cuMemUnmap_(base, range.mapped), "cuMemUnmap");
  if (range.base) check_driver(cuMemAddressFree_(base, range.reserved), "cuMemAddressFree");
  range = {};
}

DeviceMemoryInfo memory_info() {
  DeviceMemoryInfo info{};
  SHEAF_CUDA_CALL(cudaMemGetInfo, &info.free, &info.total);
  return info;
}

void free(void* memory) { SHEAF_CUDA_GIVE_BACK(cudaFree, memory); }

void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocHost(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail<OutOfMemory>("[cudaMallocHost] ", bytes, " bytes of page-locked memory asked: the host has ",
                      "not so many free, or may not lock them");
  }
  check_call(error, "cudaMallocHost");
  return memory;
}

void free_pinned(void* memory) { SHEAF_CUDA_GIVE_BACK(cudaFreeHost, memory); }

Stream make_stream(int device, Priority priority) {
  use_device(device);
  int least = 0, greatest = 0;
  SHEAF_CUDA_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
  // The highest priority is the smallest number.
  const int value = priority == Priority::high  ? greatest
                    : priority == Priority::low ? least
                                                : (least + greatest) / 2;
  cudaStream_t stream = nullptr;
  SHEAF_CUDA_CALL(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking, value);
  return {Device::cuda(device), stream};
}

void destroy_stream(const Stream& stream) {
  use_device(stream.device.index);  // a thread that never selected a device would get a context on GPU 0
  // CUDA's own function would let work continue whose memory is freed next.
  const cudaError_t work = cudaStreamSynchronize(handle_of(stream));
  SHEAF_CUDA_CALL(cudaStreamDestroy, handle_of(stream));
  check_call(work, "cudaStreamSynchronize");
}
void synchronize(const Stream& stream) {
  SHEAF_CUDA_CALL(cudaStreamSynchronize, handle_of(stream));
}

namespace {

EventHandle make_event(unsigned flags) {
  cudaEvent_t event = nullptr;
  SHEAF_CUDA_CALL(cudaEventCreateWithFlags, &event, flags);
  return event;
}

}  // namespace

EventHandle make_event() { return make_event(cudaEventDisableTiming); }
EventHandle make_timed_event() { return make_event(cudaEventDefault); }

void destroy_event(EventHandle event) { SHEAF_CUDA_GIVE_BACK(cudaEventDestroy, event_of(event)); }
void record(EventHandle event, const Stream& stream) {
  SHEAF_CUDA_CALL(cudaEventRecord, event_of(event), handle_of(stream));
}
void wait(const Stream& stream, EventHandle event) {
  SHEAF_CUDA_CALL(cudaStreamWaitEvent, handle_of(stream), event_of(event), 0);
}
void synchronize(EventHandle event) { SHEAF_CUDA_CALL(cudaEventSynchronize, event_of(event)); }

bool reached(EventHandle event) {
  const cudaError_t error = cudaEventQuery(event_of(event));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // the runtime keeps it as this thread's last error: a launch would be taken for one that failed
    return false;
  }
  check_call(error, "cudaEventQuery");
  return true;
}

double seconds_between(EventHandle begin, EventHandle end) {
  float milliseconds = 0;
  SHEAF_CUDA_CALL(cudaEventElapsedTime, &milliseconds, event_of(begin), event_of(end));
  return 1e-3 * static_cast<double>(milliseconds);
}

void begin_capture(const Stream& stream) {
  SHEAF_CUDA_CALL(cudaStreamBeginCapture, handle_of(stream), cudaStreamCaptureModeRelaxed);
}

GraphHandle end_capture(const Stream& stream) {
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(handle_of(stream), &graph);
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> recorded(graph, cudaGraphDestroy);
  check_call(error, "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  // Kernels keep the priorities of the streams that they were recorded on.
  SHEAF_CUDA_CALL(cudaGraphInstantiate, &executable, graph,
                  cudaGraphInstantiateFlagUseNodePriority);
  return executable;
}

bool capturing(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SHEAF_CUDA_CALL(cudaStreamIsCapturing, handle_of(stream), &status);
  return status != cudaStreamCaptureStatusNone;
}

void launch_graph(GraphHandle graph, const Stream& stream) {
  SHEAF_CUDA_CALL(cudaGraphLaunch, static_cast<cudaGraphExec_t>(graph), handle_of(stream));
}
void destroy_graph(GraphHandle graph) {
  SHEAF_CUDA_CALL(cudaGraphExecDestroy, static_cast<cudaGraphExec_t>(graph));
}

void copy_bytes(const Stream& stream, void* to, const void* from, size_t bytes, Copy) {
  // By the addresses: memory that counts as a GPU's here may be host memory (MemoryKind::host).
  if (bytes)
    SHEAF_CUDA_CALL(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDefault, handle_of(stream));
}

void fill_bytes(const Stream& stream, void* to, int byte, size_t bytes) {
  if (bytes) SHEAF_CUDA_CALL(cudaMemsetAsync, to, byte, bytes, handle_of(stream));
}

}  // namespace sheaf::kernels::cuda
