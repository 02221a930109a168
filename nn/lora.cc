#include "sheaf/nn/lora.h"

#include "sheaf/nn/layers/linear.h"

namespace sheaf::nn {

Lora::Lora(const Parameter& weight, const LoraOptions& options)
    : scale(options.alpha / static_cast<double>(std::max<int64_t>(1, options.rank))) {
  check<ConfigError>(options.rank > 0, "[lora] a rank of ", options.rank, " for ", weight.shape(), ": at least 1");
  const int64_t out = weight.shape()[0], in = weight.shape()[1];
  a = Parameter({options.rank, in}, Init::uniform(1.0 / std::sqrt(static_cast<double>(in))));
  b = Parameter({out, options.rank}, Init::zeros());
  if (const auto& cut = weight.cut()) (cut->dim() == 0 ? b : a).set_cut(*cut);
}

int64_t add_lora(Module& model, const LoraOptions& options, const std::function<bool(const std::string&)>& picks) {
  for (Parameter& p : model.parameters()) p.freeze();
  int64_t added = 0;
  for (const auto& [path, module] : model.named_modules()) {
    auto* layer = dynamic_cast<Linear*>(module);
    if (!layer || (picks && !picks(path))) continue;
    check<ConfigError>(!layer->lora, "[lora] '", path, "' has one already");
    layer->lora.emplace(layer->weight, options);
    ++added;
  }
  return added;
}

bool is_lora(std::string_view name) { return name.ends_with(".lora.a") || name.ends_with(".lora.b"); }

}  // namespace sheaf::nn
