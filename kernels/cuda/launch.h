// Included by every .cu file: CUDA's device language, from nvcc or from the emulation, and launch(). code_loading.h explains when
// launch() only loads code.
//
// Kernels are written in the part of CUDA that emulation.h implements: thread and block indices,
// __shared__ (and dynamic_shared), __syncthreads, full-warp shuffles and votes, integer atomics,
// vector types; and of tensor_cores.h.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/code_loading.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"

#ifndef SHEAF_CUDA_EMULATED
#error "this target needs local_defines = EMULATED_DEFINES (tools/bazel/cuda/defs.bzl)"
#endif

#if SHEAF_CUDA_EMULATED
#include "sheaf/kernels/cuda/emulation.h"
#else
#include <algorithm>
#include <mutex>

#include <cuda_runtime.h>
#endif

namespace sheaf::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

/// ceil(n / d) for n >= 0.
__host__ __device__ constexpr int64_t blocks_for(int64_t n, int64_t d) { return (n + d - 1) / d; }

/// Dynamic shared memory of a block: one of Hopper's 227 KiB is left for __shared__ arrays. A kernel that has more of them and needs
/// most of this asserts that both fit into kBlocksSharedBytes.
inline constexpr size_t kMostSharedBytes = kBlocksSharedBytes - (1 << 10);

struct LaunchShape {
  int64_t blocks = 1;       ///< grid.x, at most 2^31 - 1
  int threads = 256;        ///< block.x, a multiple of a warp, at most 1,024
  int64_t blocks_y = 1;     ///< grid.y, at most 65,535
  int64_t blocks_z = 1;     ///< grid.z, at most 65,535
  size_t shared_bytes = 0;  ///< for dynamic_shared(), at most kMostSharedBytes

  /// False if there are no blocks, which is an error in CUDA but not here. Throws ConfigError if a
  /// GPU would refuse the launch; `name` is the op.
  bool check(const char* name) const {
    sheaf::check<ConfigError>(
        blocks >= 0 && blocks <= INT32_MAX && blocks_y >= 0 && blocks_y <= 65535 && blocks_z >= 0 &&
            blocks_z <= 65535 && threads > 0 && threads <= 1024 && shared_bytes <= kMostSharedBytes,
        '[', name, "] no GPU takes a launch of ", blocks, " x ", blocks_y, " x ", blocks_z,
        " blocks of ", threads, " threads with ", shared_bytes, " bytes of shared memory each");
    return blocks > 0 && blocks_y > 0 && blocks_z > 0;
  }
};

#if !SHEAF_CUDA_EMULATED

/// The dynamic shared memory of a block, 16-byte aligned.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char sheaf_dynamic_shared[];
  return reinterpret_cast<T*>(sheaf_dynamic_shared);
}

/// The shared memory that a block may have without opting in, its __shared__ arrays included. These are at most 16 KiB in kernels
/// that also have dynamic shared memory.
inline constexpr size_t kSharedUnasked = 48 << 10, kMostArrays = 16 << 10;

/// Lets blocks of a kernel have `bytes` of dynamic shared memory. The limit is the kernel's, for all threads that launch it, so it is
/// never lowered: other threads and graphs rely on it.
inline cudaError_t allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || bytes + attributes.sharedSizeBytes <= kSharedUnasked) return error;
  const auto wanted = static_cast<int>(std::max(bytes, kSharedUnasked + 1));
  if (attributes.maxDynamicSharedSizeBytes >= wanted) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wanted);
}

/// Requesting a kernel's attributes loads its code, if loading is lazy.
inline void load_code(const char* name, const void* kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  check<CudaError>(error == cudaSuccess, '[', name, "] load: ", cudaGetErrorString(error));
}

/// Enqueues kernel(args...) on `stream`; `name` is the op in errors. Does nothing if there are no blocks.
template <class... Parameters, class... Args>
void launch(const char* name, const Stream& stream, const LaunchShape& shape,
            void (*kernel)(Parameters...), Args... args) {
  if (!shape.check(name)) return;
  if (CodeLoading::active()) return load_code(name, reinterpret_cast<const void*>(kernel));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y),
                        static_cast<unsigned>(shape.blocks_z));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > kSharedUnasked - kMostArrays)
    error = allow_shared(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  // Not <<<>>>, which reports the thread's last error, perhaps that of an earlier call.
  if (error == cudaSuccess)
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...);
  check<CudaError>(error == cudaSuccess, '[', name, "] launch of ", shape.blocks, " x ",
                   shape.blocks_y, " x ", shape.blocks_z, " blocks of ", shape.threads,
                   " threads: ", cudaGetErrorString(error));
}

#else

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulation::dynamic_shared());
}

template <class... Parameters, class... Args>
void launch(const char* name, const Stream& stream, const LaunchShape& shape,
            void (*kernel)(Parameters...), Args... args) {
  if (!shape.check(name) || CodeLoading::active()) return;
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y),
                  static_cast<unsigned>(shape.blocks_z));
  const auto threads = static_cast<unsigned>(shape.threads);
  emulation::enqueue(stream, [=] {
    emulation::run(name, grid, threads, shape.shared_bytes,
                   [&] { kernel(static_cast<Parameters>(args)...); });
  });
}

#endif

}  // namespace sheaf::kernels::cuda
