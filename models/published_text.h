// The text conventions of published weights: the tokenizer, tokens that precede a text, and end tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

struct PublishedText {
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;
  std::vector<int32_t> before = {};  ///< ids that precede each text, such as Llama's <|begin_of_text|>
  std::vector<int32_t> ends = {};    ///< ids of end tokens
};

/// Whether there is a tokenizer in `folder`.
bool has_published_text(const std::string& folder);

/// From a folder with tokenizer.json, whose post-processor defines what precedes a text, or with GPT-2's vocab.json and merges.txt;
/// ends are eos_token_id of generation_config.json, else of config.json. Throws ConfigError if there is no tokenizer, DataError
/// naming the malformed file.
PublishedText read_published_text(const std::string& folder);

}  // namespace sheaf::models
