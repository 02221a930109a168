#include <cuda_runtime.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/adamw.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;   // floats in a 16-byte access
constexpr int kVectors = 4;  // accesses per thread and array; one segment search serves them all
constexpr int64_t kBlockElements = int64_t{kThreads} * kVector * kVectors;

struct Coefficients {
  AdamWScalars s;
  AdamWConstants c;
};

// The order of operations is a promise of the header; the file is compiled with -fmad=false
// -ftz=true.
__device__ __forceinline__ void update(const Coefficients& k, float weight_decay, float grad,
                                       float& p, float& m, float& v) {
  const float g = k.s.clip_scale * grad;
  m = k.c.beta1 * m + (1.0f - k.c.beta1) * g;
  v = k.c.beta2 * v + ((1.0f - k.c.beta2) * g) * g;
  p = p - (k.s.learning_rate * weight_decay) * p;
  const float step = (m / k.s.bias_correction1) / (sqrtf(v / k.s.bias_correction2) + k.c.epsilon);
  p = p - k.s.learning_rate * step;
}

// The last segment that begins at or before `element`.
__device__ int64_t find_segment(const AdamWSegment* segments, int64_t count, int64_t element) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (segments[middle].begin <= element ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(AdamWShard shard, const AdamWSegment* __restrict__ segments, int64_t num_segments,
                 const AdamWScalars* __restrict__ scalars, AdamWConstants constants) {
  const int64_t block_begin = blockIdx.x * kBlockElements;
  // One search per block; from its segment a thread walks on, mostly by no step at all.
  __shared__ int64_t block_segment;
  if (threadIdx.x == 0) block_segment = find_segment(segments, num_segments, block_begin);
  __syncthreads();

  const Coefficients k{*scalars, constants};
  int64_t segment = block_segment;
  for (int j = 0; j < kVectors; ++j) {
    const int64_t i = block_begin + (int64_t{j} * kThreads + threadIdx.x) * kVector;
    if (i >= shard.n) return;
    while (segment + 1 < num_segments && segments[segment + 1].begin <= i) ++segment;
    const float decay = segments[segment].weight_decay;
    if (i + kVector <= shard.n) {
      float4 p = *reinterpret_cast<const float4*>(shard.param + i);
      float4 m = *reinterpret_cast<const float4*>(shard.moment1 + i);
      float4 v = *reinterpret_cast<const float4*>(shard.moment2 + i);
      // Each gradient is read once and by one thread: it need not push anything out of the cache.
      const float4 g = __ldcs(reinterpret_cast<const float4*>(shard.grad + i));
      update(k, decay, g.x, p.x, m.x, v.x);
      update(k, decay, g.y, p.y, m.y, v.y);
      update(k, decay, g.z, p.z, m.z, v.z);
      update(k, decay, g.w, p.w, m.w, v.w);
      *reinterpret_cast<float4*>(shard.param + i) = p;
      *reinterpret_cast<float4*>(shard.moment1 + i) = m;
      *reinterpret_cast<float4*>(shard.moment2 + i) = v;
    } else {
      for (int64_t e = i; e < shard.n; ++e) {
        update(k, decay, shard.grad[e], shard.param[e], shard.moment1[e], shard.moment2[e]);
      }
    }
  }
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0;
}

}  // namespace

void adamw(CUstream_st* stream, const AdamWShard& shard, const AdamWSegment* segments,
           int64_t num_segments, const AdamWScalars* scalars, const AdamWConstants& constants) {
  check<ConfigError>(num_segments > 0, "[adamw] needs at least one weight-decay segment");
  check<ConfigError>(aligned(shard.param) && aligned(shard.moment1) && aligned(shard.moment2) &&
                         aligned(shard.grad),
                     "[adamw] the arrays of a shard must be 16-byte aligned");
  if (shard.n <= 0) return;
  const int64_t blocks = (shard.n + kBlockElements - 1) / kBlockElements;
  check<ConfigError>(blocks <= INT32_MAX, "[adamw] a shard of ", shard.n, " elements is too long");
  adamw_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      shard, segments, num_segments, scalars, constants);
  const cudaError_t error = cudaGetLastError();
  check<CudaError>(error == cudaSuccess, "[adamw] launch failed: ", cudaGetErrorString(error));
}

}  // namespace sheaf::kernels::cuda
