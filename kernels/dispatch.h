// SHEAF_ON_DEVICE(stream, softmax, x, out): calls kernels::cpu::softmax(x, out) or kernels::cuda::softmax(stream, x, out)
// by the stream's device. Ops that have no CUDA kernel yet use SHEAF_ON_CPU, which says so.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"

namespace sheaf::kernels {
[[noreturn]] inline void no_kernel(const char* kernel, const Device& device) {
  fail<ConfigError>("[", kernel, "] has no kernel for ", device.to_string());
}
}  // namespace sheaf::kernels

#define SHEAF_ON_CPU(stream, kernel, ...)                              \
  do {                                                                 \
    if (!(stream).device.is_cpu()) ::sheaf::kernels::no_kernel(#kernel, (stream).device); \
    ::sheaf::kernels::cpu::kernel(__VA_ARGS__);                        \
  } while (0)
