#include "sheaf/nn/fp8.h"

#include "sheaf/nn/layers/experts.h"
#include "sheaf/nn/layers/linear.h"

namespace sheaf::nn {
namespace {

bool suits(const Parameter& weight) {
  const Shape& shape = weight.shape();
  return !weight.table() && shape.back() % 16 == 0 && shape.dim(-2) % 16 == 0;
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
  return count;
}

}  // namespace sheaf::nn
