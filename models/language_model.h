// Creates the model of a configuration.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "sheaf/models/decoder.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Builds the model that `config` describes, without memory. `vocab` replaces config.vocab where that is 0. In a `frozen` model
/// nothing is trained, adapters included. Throws ConfigError.
std::unique_ptr<Decoder> make_language_model(const ModelConfig& config, int64_t vocab, bool frozen = false);

/// ShardOptions::compute_dtype by the option `section`.dtype: none for "f32", bf16 or f16. ConfigError for others.
std::optional<DType> compute_dtype_from(std::string_view section, std::string_view name);

}  // namespace sheaf::models
