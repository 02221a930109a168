#include "sheaf/distributed/device_choice.h"

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf {
namespace {

// Why this rank cannot have a GPU of its own; empty if it can.
std::string obstacle(const Rendezvous& r) {
  if constexpr (!kernels::kHasCuda) {
    return "this build has no CUDA";
  } else {
    const int gpus = kernels::cuda::device_count();
    if (gpus == 0) return "there is no GPU: " + kernels::cuda::why_no_device();
    if (r.local_rank >= gpus)
      return str("rank ", r.rank, " is number ", r.local_rank, " of ", r.local_world, " on this host, which has ", gpus,
                 gpus == 1 ? " GPU" : " GPUs", ", and each rank needs its own");
    return "";
  }
}

}  // namespace

DeviceChoice choose_device(const Rendezvous& r, const Environment& environment) {
  const char* value = environment("SHEAF_DEVICE");
  const std::string wish = value && *value ? value : "auto";
  if (wish == "cpu") return {Device::cpu()};
  if (wish != "auto" && wish != "cuda")
    fail<ConfigError>("[device] SHEAF_DEVICE='", wish, "' is none of auto, cpu and cuda");
  const std::string why = obstacle(r);
  if (wish == "cuda") {
    if (!why.empty()) fail<ConfigError>("[device] SHEAF_DEVICE=cuda, but ", why);
    return {Device::cuda(r.local_rank), true};
  }
  // The emulated GPU is for tests: it is taken where it is asked for.
  if (why.empty() && !kernels::emulated_cuda()) return {Device::cuda(r.local_rank)};
  bool there = false;
  if constexpr (kernels::kHasCuda) there = !kernels::emulated_cuda() && kernels::cuda::device_count() > 0;
  return {Device::cpu(), false, there ? why : ""};
}

void use_device(Device device, RankContext& context) {
  if constexpr (kernels::kHasCuda)
    if (device.is_cuda() && !context.gpu) context.gpu = kernels::cuda::make_gpu(device.index);
  context.device = device;
}

}  // namespace sheaf
