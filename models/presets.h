// The published sizes of the reference models, as options of a run.
#pragma once

#include <map>
#include <string>

#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// By name, such as "gpt2-124m" and "llama3-8b": those of GptConfig and LlamaConfig. Their `preset` is empty.
const std::map<std::string, ModelConfig>& presets();

}  // namespace sheaf::models
