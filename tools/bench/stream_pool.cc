#include "sheaf/tools/bench/stream_pool.h"

#include <algorithm>

#include <cuda_runtime.h>

#include "sheaf/core/error.h"

namespace sheaf::bench {
namespace {

void check_call(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail<CudaError>("[", call, "] ", cudaGetErrorString(error));
}
cudaMemPool_t pool_of(void* pool) { return static_cast<cudaMemPool_t>(pool); }
cudaStream_t stream_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

StreamPool::StreamPool(int device) {
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  cudaMemPool_t pool;
  check_call(cudaMemPoolCreate(&pool, &props), "cudaMemPoolCreate");
  pool_ = pool;
  uint64_t keep_all = UINT64_MAX;
  check_call(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_all),
             "cudaMemPoolSetAttribute");
}
StreamPool::~StreamPool() {
  cudaDeviceSynchronize();  // frees take effect in stream order
  cudaMemPoolDestroy(pool_of(pool_));
}

std::string StreamPool::name() { return "cudaMallocAsync"; }

void* StreamPool::allocate(size_t bytes, const Stream& stream) {
  void* block = nullptr;
  check_call(cudaMallocFromPoolAsync(&block, std::max<size_t>(bytes, 1), pool_of(pool_),
                                     stream_of(stream)),
             "cudaMallocFromPoolAsync");
  return block;
}
void StreamPool::free(void* block, const Stream& stream) {
  check_call(cudaFreeAsync(block, stream_of(stream)), "cudaFreeAsync");
}

}  // namespace sheaf::bench
