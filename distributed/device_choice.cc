#include "sheaf/distributed/device_choice.h"

#include <optional>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf {
namespace {

constexpr std::string_view kAsked = "asked ";  // before what a rank tells
constexpr int kLeastCapability = 90;  // what the kernels are compiled for
constexpr auto kLeastBlockBytes = static_cast<int64_t>(kernels::cuda::kBlocksSharedBytes);

// The index of this rank's GPU. A launcher that binds one to each rank (srun --gpus-per-task 1) makes only that one visible.
int index_for(const Rendezvous& r, const GpusHere& gpus) { return gpus.usable.size() == 1 ? 0 : r.local_rank; }

// Why this rank cannot have an exclusive GPU; empty if it can.
std::string obstacle(const Rendezvous& r, const GpusHere& gpus) {
  if (!kernels::kHasCuda) return "this build has no CUDA";
  const auto count = static_cast<int>(gpus.usable.size());
  if (count == 0) return "there is no GPU: " + gpus.why_none;
  const int index = index_for(r, gpus);
  if (index >= count)
    return str("rank ", r.rank, " is number ", r.local_rank, " of ", r.local_world, " on this host, which has ", count,
               " GPUs, and each rank needs its own");
  const auto [capability, block_bytes] = gpus.usable[static_cast<size_t>(index)];
  const std::string has = str("GPU ", index, " has the compute capability ", capability / 10, ".", capability % 10, ", ");
  if (capability < kLeastCapability)
    return str(has, "and this build code for ", kLeastCapability / 10, ".", kLeastCapability % 10, " and later");
  if (block_bytes < kLeastBlockBytes)
    return str(has, "whose blocks have at most ", block_bytes >> 10, " KiB of shared memory, and the kernels need ", kLeastBlockBytes >> 10);
  return "";
}

}  // namespace

GpusHere GpusHere::look() {
  GpusHere here;
  if constexpr (kernels::kHasCuda) {
    const int count = kernels::cuda::device_count();
    for (int i = 0; i < count; ++i) here.usable.push_back({kernels::cuda::compute_capability(i), kernels::cuda::block_shared_bytes(i)});
    if (count == 0) here.why_none = kernels::cuda::why_no_device();
    here.emulated = kernels::emulated_cuda();
    here.driver = path_exists("/proc/driver/nvidia/version");
  }
  return here;
}

DeviceWish DeviceWish::from(const Environment& environment) {
  DeviceWish wish;
  if (const char* value = environment(wish.source.c_str()); value && *value) wish.device = value;
  return wish;
}

DeviceChoice choose_device(const Rendezvous& r, const DeviceWish& wish, const GpusHere& gpus) {
  if (wish.device == "cpu") return {Device::cpu()};
  if (wish.device != "auto" && wish.device != "cuda")
    fail<ConfigError>("[device] ", wish.source, "='", wish.device, "' is none of auto, cpu and cuda");
  const std::string why = obstacle(r, gpus);
  if (wish.device == "cuda") {
    if (!why.empty()) fail<ConfigError>("[device] ", wish.source, "=cuda, but ", why);
    return {Device::cuda(index_for(r, gpus)), true};
  }
  if (gpus.emulated) return {Device::cpu()};
  if (why.empty()) return {Device::cuda(index_for(r, gpus))};
  return {Device::cpu(), false, gpus.driver || !gpus.usable.empty() ? why : ""};
}

std::string choice_for_others(const DeviceChoice& choice) {
  if constexpr (kernels::kHasCuda)
    if (choice.device.is_cuda()) return str(choice.asked ? kAsked : "", "gpu ", kernels::cuda::device_identity(choice.device.index));
  return "cpu " + choice.why;
}

DeviceChoice agreed_device(const DeviceChoice& choice, const std::vector<std::string>& told) {
  std::vector<std::string> plain = told;
  std::optional<size_t> asked;  // the first rank that must have a GPU
  std::string why;              // not all have one
  for (size_t a = 0; a < plain.size(); ++a) {
    if (plain[a].starts_with(kAsked)) {
      plain[a].erase(0, kAsked.size());
      asked = asked.value_or(a);
    }
    if (!why.empty()) continue;
    if (plain[a].starts_with("cpu")) why = str("rank ", a, " computes on its CPU", plain[a].size() > 4 ? ": " + plain[a].substr(4) : "");
    for (size_t b = 0; b < a && why.empty(); ++b)
      if (plain[a] == plain[b]) why = str("ranks ", b, " and ", a, " have the same GPU, and each rank needs its own");
  }
  if (asked && !why.empty()) fail<ConfigError>("[device] SHEAF_DEVICE=cuda on rank ", *asked, ", but ", why);
  return why.empty() || choice.device.is_cpu() ? choice : DeviceChoice{Device::cpu(), false, why};
}

void use_device(Device device, RankContext& context) {
  if constexpr (kernels::kHasCuda)
    if (device.is_cuda() && !context.gpu) context.gpu = kernels::cuda::make_gpu(device.index);
  context.device = device;
}

}  // namespace sheaf
