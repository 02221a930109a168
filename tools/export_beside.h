// What `transformers` reads besides a model's weights.
#pragma once

#include <string>

#include "sheaf/core/dtype.h"
#include "sheaf/models/run_state.h"

namespace sheaf::tools {

/// The model_type of the published weights that the run started from, if they are still there; else "".
std::string published_like(const models::RunState& state);

/// Writes config.json to `folder`. If the published weights that the run started from are still there, it has their special tokens and,
/// if that is longer and positions are not a table, their context; else the end of text is the tokenizer's, and that of training's
/// documents.
void export_config(const models::RunState& state, const models::ModelConfig& model, DType dtype, const std::string& folder);

/// Copies what is next to those published weights, such as the chat template, and writes the run's tokenizer if it has the form of
/// tokenizer.json: others were published elsewhere. Returns a line that reports it.
std::string export_tokenizer(const models::RunState& state, const std::string& folder);

}  // namespace sheaf::tools
