// The files that `transformers` reads in addition to a model's weights.
#pragma once

#include <string>

#include "sheaf/core/dtype.h"
#include "sheaf/models/run_state.h"

namespace sheaf::tools {

/// What can stand next to weights besides config.json.
inline constexpr const char* kCompanions[] = {"tokenizer.json",          "tokenizer_config.json", "generation_config.json",
                                              "special_tokens_map.json", "chat_template.jinja",   "vocab.json", "merges.txt"};

/// The model_type of the published weights that the run started from, if they still exist; else "".
std::string published_like(const models::RunState& state);

/// Writes config.json to `folder`. If the published weights that the run started from still exist, it has their special tokens and,
/// if that is longer and the model has no position table, their context; otherwise the end-of-text token is the tokenizer's, and that
/// of training's documents.
void export_config(const models::RunState& state, const models::ModelConfig& model, DType dtype, const std::string& folder);

/// Copies the files next to those published weights, such as the chat template, and writes the run's tokenizer if it is a
/// tokenizer.json: other kinds were published elsewhere. Returns a line that reports it.
std::string export_tokenizer(const models::RunState& state, const std::string& folder);

}  // namespace sheaf::tools
