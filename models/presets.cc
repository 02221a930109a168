#include "sheaf/models/presets.h"

#include "sheaf/models/model_options.h"

namespace sheaf::models {
const std::map<std::string, ModelConfig>& presets() {
  static const std::map<std::string, ModelConfig> table = [] {
    std::map<std::string, ModelConfig> t;
    for (const auto& [name, config] : GptConfig::published()) t.emplace(name, options_of(config));
    for (const auto& [name, config] : LlamaConfig::published()) t.emplace(name, options_of(config));
    return t;
  }();
  return table;
}

}  // namespace sheaf::models
