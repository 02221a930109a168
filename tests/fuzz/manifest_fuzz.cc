// libFuzzer target: any bytes as a manifest's entries for tensors. An accepted manifest covers each tensor exactly once, and survives being
// written and read again.
#include <string_view>
#include <vector>

#include "sheaf/models/checkpoint_manifest.h"

namespace {

using Tensors = sheaf::models::Checkpoint::Tensors;

bool same(const Tensors& a, const Tensors& b) {
  return sheaf::models::json_of(a) == sheaf::models::json_of(b);
}

bool covered_once(const sheaf::models::Checkpoint::TensorInfo& info) {
  std::vector<int> times(static_cast<size_t>(info.shape.numel()));
  for (const auto& part : info.parts)
    for (int64_t i = 0; i < part.runs.numel(); ++i) ++times.at(static_cast<size_t>(part.runs.at(i)));
  for (int n : times)
    if (n != 1) return false;
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sheaf::models;
  try {
    const auto json = sheaf::Json::parse({reinterpret_cast<const char*>(data), size}, "fuzz");
    const Tensors tensors = tensors_of(json, 4);
    if (!same(tensors, tensors_of(json_of(tensors), 4))) __builtin_trap();
    for (const auto& [name, info] : tensors)
      if (info.shape.numel() < 4096 && !covered_once(info)) __builtin_trap();
  } catch (const sheaf::DataError&) {
  } catch (const sheaf::CheckpointError&) {
  }
  return 0;
}
