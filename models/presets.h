// The published sizes of the reference models, as options of a run.
#pragma once

#include <map>
#include <string>

#include "sheaf/models/train_config.h"

namespace sheaf::models {

struct GptConfig;
struct LlamaConfig;

/// A model's own configuration as options of a run.
ModelConfig options_of(const GptConfig& config);
ModelConfig options_of(const LlamaConfig& config);

/// By name, such as "gpt2-124m" and "llama3-8b": those of GptConfig and LlamaConfig. Their `preset` is empty.
const std::map<std::string, ModelConfig>& presets();

}  // namespace sheaf::models
