#include "sheaf/kernels/cuda/idle.h"

#include <thread>

#include "sheaf/kernels/cuda/launch.h"

namespace sheaf::kernels::cuda {
namespace {

#if SHEAF_CUDA_EMULATED
void sleep_for(int64_t nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
}
#else
// Nanoseconds since some moment, by one clock for the whole device, unlike its cycle counters.
__device__ int64_t device_time() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ void sleep_for(int64_t nanoseconds) {
  for (const int64_t begin = device_time(); device_time() - begin < nanoseconds;) __nanosleep(500);
}
#endif

__global__ void idle_kernel(int64_t nanoseconds) {
  if (threadIdx.x == 0) sleep_for(nanoseconds);
}

}  // namespace

void idle(const Stream& stream, std::chrono::nanoseconds duration) {
  launch("idle", stream, {.blocks = 1, .threads = kWarp}, idle_kernel,
         static_cast<int64_t>(duration.count()));
}

}  // namespace sheaf::kernels::cuda
