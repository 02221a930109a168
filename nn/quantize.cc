#include "sheaf/nn/quantize.h"

#include "sheaf/nn/layers/mlp.h"

namespace sheaf::nn {
namespace {

// Shards the inputs of `down` in whole blocks.
template <class Mlp>
void cut_in_blocks(Module* module) {
  auto* const mlp = dynamic_cast<Mlp*>(module);
  if (mlp && mlp->down.weight.blocks()) mlp->cut_hidden_in(kBlockSize);
}

}  // namespace

int64_t quantize(Module& model, BlockFormat format, const std::function<bool(const std::string&)>& picks) {
  int64_t count = 0;
  for (Parameter& p : model.parameters()) {
    if (!p.state().frozen_for_good || p.exact() || p.table() || p.bias() || p.shape().rank() < 2 || (picks && !picks(p.name()))) continue;
    p.quantize(format);
    ++count;
  }
  for (const auto& [path, module] : model.named_modules()) cut_in_blocks<MLP>(module), cut_in_blocks<GatedMLP>(module);
  return count;
}

}  // namespace sheaf::nn
