#include "sheaf/nn/lora.h"

#include <map>
#include <set>
#include <vector>

#include "sheaf/nn/layers/linear.h"

namespace sheaf::nn {

Lora::Lora(const Parameter& weight, const LoraOptions& options) : scale(options.alpha / static_cast<double>(options.rank)) {
  const int64_t out = weight.shape()[0], in = weight.shape()[1];
  a = Parameter({options.rank, in}, Init::uniform(1.0 / std::sqrt(static_cast<double>(in))));
  b = Parameter({out, options.rank}, Init::zeros());
  if (const auto& cut = weight.cut()) (cut->dim() == 0 ? b : a).set_cut(*cut);
  if (!weight.matrices().empty()) b.set_matrices(weight.matrices());
}

int64_t add_lora(Module& model, const LoraOptions& options, const std::function<bool(const std::string&)>& picks) {
  check<ConfigError>(options.rank > 0, "[lora] a rank of ", options.rank, ": at least 1");
  std::vector<Linear*> layers;
  std::set<const Parameter::State*> of_others;  // existing adapters stay trainable
  for (const auto& [path, module] : model.named_modules()) {
    auto* layer = dynamic_cast<Linear*>(module);
    if (!layer) continue;
    if (layer->lora) of_others.insert({layer->lora->a.id(), layer->lora->b.id()});
    if (layer->weight.table() || (picks && !picks(path))) continue;
    check<ConfigError>(!layer->lora, "[lora] '", path, "' has one already");
    layers.push_back(layer);
  }
  for (Parameter& p : model.parameters())
    if (!of_others.contains(p.id())) p.freeze_for_good();
  for (Linear* layer : layers) layer->lora.emplace(layer->weight, options);
  return std::ssize(layers);
}

void copy_lora(Module& source, Module& target) {
  std::map<std::string, const Lora*> adapters;
  for (const auto& [path, module] : source.named_modules())
    if (const auto* layer = dynamic_cast<Linear*>(module); layer && layer->lora) adapters[path] = &*layer->lora;
  if (adapters.empty()) return;
  for (const auto& [path, module] : target.named_modules()) {
    auto* layer = dynamic_cast<Linear*>(module);
    const auto like = adapters.find(path);
    if (!layer || layer->lora || like == adapters.end()) continue;
    const int64_t rank = like->second->a.shape()[0];
    layer->lora.emplace(layer->weight, LoraOptions{.rank = rank});
    layer->lora->scale = like->second->scale;
  }
}

bool is_lora(std::string_view name) {
  const auto is = [&](std::string_view own) { return name == own || name.ends_with(str(".", own)); };
  return is("lora.a") || is("lora.b");
}

}  // namespace sheaf::nn
