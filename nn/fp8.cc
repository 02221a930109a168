#include "sheaf/nn/fp8.h"

#include "sheaf/nn/layers/experts.h"
#include "sheaf/nn/layers/mlp.h"

namespace sheaf::nn {
namespace {

constexpr int64_t kUnit = 16;

bool suits(const Parameter& weight) {
  const Shape& shape = weight.shape();
  return !weight.table() && shape.back() % kUnit == 0 && shape.dim(-2) % kUnit == 0;
}

// So that a rank's part is suitable, too. Whole blocks are anyway.
template <class Mlp>
void cut_in_units(Module* module) {
  auto* const mlp = dynamic_cast<Mlp*>(module);
  if (mlp && mlp->down.fp8 != Fp8::none && !mlp->down.weight.blocks()) mlp->cut_hidden_in(kUnit);
}

}  // namespace

int64_t use_fp8(Module& model, Fp8 products, const std::function<bool(const std::string&)>& picks) {
  int64_t count = 0;
  for (const auto& [path, module] : model.named_modules()) {
    if (picks && !picks(path)) continue;
    auto* const layer = dynamic_cast<Linear*>(module);
    auto* const experts = dynamic_cast<Experts*>(module);
    if (layer && suits(layer->weight)) layer->fp8 = products;
    else if (experts && suits(experts->gate)) experts->fp8 = products;
    else continue;
    ++count;
  }
  for (const auto& [path, module] : model.named_modules()) cut_in_units<MLP>(module), cut_in_units<GatedMLP>(module);
  return count;
}

}  // namespace sheaf::nn
