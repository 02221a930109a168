#include "sheaf/nn/quantize.h"

#include "sheaf/nn/layers/mlp.h"

namespace sheaf::nn {
namespace {

bool rests_in_blocks(const Linear& layer) { return layer.weight.blocks().has_value(); }

// In whole blocks of what `down` reads.
void cut_in_blocks(Linear& down, std::initializer_list<Linear*> up) {
  if (!rests_in_blocks(down) || !down.weight.cut()) return;
  down.set_cut(OwnershipMap::even(1, kBlockSize));
  for (Linear* layer : up) layer->set_cut(OwnershipMap::even(0, kBlockSize));
}

}  // namespace

int64_t quantize(Module& model, BlockFormat format, const std::function<bool(const std::string&)>& picks) {
  int64_t count = 0;
  for (Parameter& p : model.parameters()) {
    if (!p.state().constant || p.exact() || p.table() || p.shape().rank() < 2 || (picks && !picks(p.name()))) continue;
    p.quantize(format);
    ++count;
  }
  for (const auto& [path, module] : model.named_modules()) {
    if (auto* mlp = dynamic_cast<MLP*>(module)) cut_in_blocks(mlp->down, {&mlp->up});
    if (auto* mlp = dynamic_cast<SwiGluMLP*>(module)) cut_in_blocks(mlp->down, {&mlp->gate, &mlp->up});
  }
  return count;
}

}  // namespace sheaf::nn
