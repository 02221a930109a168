#include "sheaf/core/transfer.h"

#include <cstring>

#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

void transfer(Device to_device, void* to, Device from_device, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (to_device.is_cpu() && from_device.is_cpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  Gpu& gpu = RankContext::current().gpu_of(to_device.is_cuda() ? to_device : from_device);
  gpu.copy(gpu.compute(), to, from, bytes,
           from_device.is_cpu() ? Gpu::Copy::to_device : to_device.is_cpu() ? Gpu::Copy::to_host : Gpu::Copy::on_device);
}

}  // namespace sheaf
