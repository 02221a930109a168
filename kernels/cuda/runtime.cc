#include "sheaf/kernels/cuda/runtime.h"

#include <cuda_runtime.h>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda {
namespace {

void check_call(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail<CudaError>('[', call, "] ", cudaGetErrorString(error));
}

cudaStream_t handle_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

#define SHEAF_CUDA_CALL(function, ...) check_call(function(__VA_ARGS__), #function)

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

int multiprocessors(int device) {
  int count = 0;
  SHEAF_CUDA_CALL(cudaDeviceGetAttribute, &count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

void use_device(int device) { SHEAF_CUDA_CALL(cudaSetDevice, device); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it would be reported again by the next call
    size_t free_bytes = 0, total = 0;
    SHEAF_CUDA_CALL(cudaMemGetInfo, &free_bytes, &total);
    fail<OutOfMemory>("[cudaMalloc] ", bytes, " bytes asked, ", free_bytes, " free of ", total,
                      " on the GPU");
  }
  check_call(error, "cudaMalloc");
  return memory;
}

void free(void* memory) { SHEAF_CUDA_CALL(cudaFree, memory); }

void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  SHEAF_CUDA_CALL(cudaMallocHost, &memory, bytes);
  return memory;
}

void free_pinned(void* memory) { SHEAF_CUDA_CALL(cudaFreeHost, memory); }

Stream make_stream(int device, Priority priority) {
  use_device(device);
  int least = 0, greatest = 0;
  SHEAF_CUDA_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
  cudaStream_t stream = nullptr;
  SHEAF_CUDA_CALL(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking,
                  priority == Priority::high ? greatest : least);
  return {Device::cuda(device), stream};
}

void destroy_stream(const Stream& stream) { SHEAF_CUDA_CALL(cudaStreamDestroy, handle_of(stream)); }
void synchronize(const Stream& stream) {
  SHEAF_CUDA_CALL(cudaStreamSynchronize, handle_of(stream));
}

EventHandle make_event() {
  cudaEvent_t event = nullptr;
  SHEAF_CUDA_CALL(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  return event;
}

void destroy_event(EventHandle event) { SHEAF_CUDA_CALL(cudaEventDestroy, event_of(event)); }
void record(EventHandle event, const Stream& stream) {
  SHEAF_CUDA_CALL(cudaEventRecord, event_of(event), handle_of(stream));
}
void wait(const Stream& stream, EventHandle event) {
  SHEAF_CUDA_CALL(cudaStreamWaitEvent, handle_of(stream), event_of(event), 0);
}
void synchronize(EventHandle event) { SHEAF_CUDA_CALL(cudaEventSynchronize, event_of(event)); }

bool reached(EventHandle event) {
  const cudaError_t error = cudaEventQuery(event_of(event));
  if (error == cudaErrorNotReady) return false;
  check_call(error, "cudaEventQuery");
  return true;
}

void copy_bytes(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) {
  constexpr cudaMemcpyKind kKinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
                                       cudaMemcpyDeviceToDevice};
  if (bytes)
    SHEAF_CUDA_CALL(cudaMemcpyAsync, to, from, bytes, kKinds[static_cast<int>(kind)],
                    handle_of(stream));
}

void fill_bytes(const Stream& stream, void* to, int byte, size_t bytes) {
  if (bytes) SHEAF_CUDA_CALL(cudaMemsetAsync, to, byte, bytes, handle_of(stream));
}

}  // namespace sheaf::kernels::cuda
