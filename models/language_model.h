// The model of a configuration.
#pragma once

#include <memory>

#include "sheaf/models/decoder.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Builds the model that `config` describes, without memory. `vocab` replaces config.vocab where that is 0.
/// Throws ConfigError.
std::unique_ptr<Decoder> make_language_model(const ModelConfig& config, int64_t vocab);

}  // namespace sheaf::models
