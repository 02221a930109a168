// SHEAF_ON_DEVICE(stream, softmax, x, out): calls kernels::cpu::softmax(x, out) or kernels::cuda::softmax(stream, x, out) by the
// stream's device. SHEAF_WORKSPACE(device, matmul, a, b, c): the bytes of kernels::cpu::matmul_workspace(a, b, c) or of cuda's; on
// meta, those of the device that it stands for. Kernels that need scratch memory only on a GPU use SHEAF_ON_DEVICE_SCRATCH(stream,
// workspace, sum, x, out), with SHEAF_GPU_WORKSPACE(device, sum, x, out).
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf::kernels {
[[noreturn]] inline void no_kernel(const char* kernel, const Device& device) {
  fail<ConfigError>("[", kernel, "] has no kernel for ", device.to_string());
}
/// A GPU, or meta that stands for one.
inline bool is_for_gpu(const Device& device) {
  return device.is_cuda() || (device.is_meta() && RankContext::current().meta_is.is_cuda());
}
}  // namespace sheaf::kernels

/// Evaluates `on_cpu` or `on_gpu`; in the latter the stream is named sheaf_stream.
#define SHEAF_BY_DEVICE(where, kernel, on_cpu, on_gpu)                                                 \
  do {                                                                                                 \
    const ::sheaf::Stream sheaf_stream = (where);                                                      \
    if (sheaf_stream.device.is_cpu()) {                                                                \
      on_cpu;                                                                                          \
    } else if constexpr (::sheaf::kernels::kHasCuda) {                                                 \
      if (!sheaf_stream.device.is_cuda()) ::sheaf::kernels::no_kernel(#kernel, sheaf_stream.device);   \
      on_gpu;                                                                                          \
    } else {                                                                                           \
      ::sheaf::kernels::no_kernel(#kernel, sheaf_stream.device);                                       \
    }                                                                                                  \
  } while (0)

#define SHEAF_ON_DEVICE(where, kernel, ...)                                                            \
  SHEAF_BY_DEVICE(where, kernel, ::sheaf::kernels::cpu::kernel(__VA_ARGS__),                           \
                  ::sheaf::kernels::cuda::kernel(sheaf_stream, __VA_ARGS__))

#define SHEAF_ON_DEVICE_SCRATCH(where, workspace, kernel, ...)                                         \
  SHEAF_BY_DEVICE(where, kernel, ::sheaf::kernels::cpu::kernel(__VA_ARGS__),                           \
                  ::sheaf::kernels::cuda::kernel(sheaf_stream, __VA_ARGS__, workspace))

#define SHEAF_BYTES_BY_DEVICE(where, on_cpu, on_gpu)                                                   \
  [&]() -> int64_t {                                                                                   \
    if constexpr (::sheaf::kernels::kHasCuda)                                                          \
      if (::sheaf::kernels::is_for_gpu(where)) return static_cast<int64_t>(on_gpu);                \
    return static_cast<int64_t>(on_cpu);                                                               \
  }()

#define SHEAF_WORKSPACE(where, kernel, ...)                                                            \
  SHEAF_BYTES_BY_DEVICE(where, ::sheaf::kernels::cpu::kernel##_workspace(__VA_ARGS__),                 \
                        ::sheaf::kernels::cuda::kernel##_workspace(__VA_ARGS__))

#define SHEAF_GPU_WORKSPACE(where, kernel, ...)                                                        \
  SHEAF_BYTES_BY_DEVICE(where, 0, ::sheaf::kernels::cuda::kernel##_workspace(__VA_ARGS__))
