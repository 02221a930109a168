// Conversion between a model's own configuration and the options of a run.
#pragma once

#include "sheaf/models/gpt.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// A model's own configuration as options.
ModelConfig options_of(const GptConfig& config);
ModelConfig options_of(const LlamaConfig& config);

/// Options as the configuration of a model of their type. ConfigError for options that the type does not have.
GptConfig gpt_config(const ModelConfig& options);
LlamaConfig llama_config(const ModelConfig& options);

}  // namespace sheaf::models
