#include "sheaf/nn/quantize.h"

#include "sheaf/nn/layers/mlp.h"

namespace sheaf::nn {

int64_t quantize(Module& model, BlockFormat format, const std::function<bool(const std::string&)>& picks) {
  int64_t count = 0;
  for (Parameter& p : model.parameters()) {
    if (!p.state().frozen_for_good || p.exact() || p.table() || p.bias() || p.shape().rank() < 2 || (picks && !picks(p.name()))) continue;
    p.quantize(format);
    ++count;
  }
  for_each_mlp(model, [](auto& mlp) {  // ranks of a tensor axis have whole blocks of what `down` reads
    if (mlp.down.weight.blocks()) mlp.cut_hidden_in(kBlockSize);
  });
  return count;
}

}  // namespace sheaf::nn
