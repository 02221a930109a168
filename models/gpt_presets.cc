// The published sizes of GPT-2.
#include "sheaf/models/gpt.h"

namespace sheaf::models {
namespace {

GptConfig gpt2(int64_t layers, int64_t heads, int64_t width) {
  GptConfig c;
  c.layers = layers;
  c.heads = heads;
  c.width = width;
  return c;
}

}  // namespace

// Radford et al. 2019, table 2.
std::vector<std::pair<std::string, GptConfig>> GptConfig::published() {
  return {{"gpt2-124m", gpt2(12, 12, 768)},
          {"gpt2-355m", gpt2(24, 16, 1024)},
          {"gpt2-774m", gpt2(36, 20, 1280)},
          {"gpt2-1558m", gpt2(48, 25, 1600)}};
}

GptConfig GptConfig::preset(const std::string& name) {
  std::string known;
  for (const auto& [key, config] : published()) {
    if (key == name) return config;
    known += (known.empty() ? "" : ", ") + key;
  }
  fail<ConfigError>("[gpt2] no preset '", name, "'; there are ", known);
}

}  // namespace sheaf::models
