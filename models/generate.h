// Sampling text from a language model.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/models/decoder.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The tokens of config.prompt, in a chat with what frames it. The default prompt, a new line, is token 0 where the vocabulary has
/// none. Throws ConfigError if it is empty, or for a chat without the special tokens of its format, DataError naming the first
/// character that is not in the vocabulary.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config);

/// Continues `prompt` by config.tokens tokens below `vocab` (a model may have room for more than the tokenizer knows),
/// at most `context` of them in view at a time, or as far as `end`, if that is drawn; returns the new ones, `end` left out.
/// Collective where the model is sharded: every rank
/// computes the same tokens. `emit` gets each token as it comes. Each token is read once, until there are more than
/// `context`: then the window slides, all positions in it change, and each new token costs a pass over `context` tokens.
std::vector<int32_t> generate(Decoder& model, const std::vector<int32_t>& prompt, int64_t context, int64_t vocab,
                              const GenerateConfig& config, const std::function<void(int32_t)>& emit = {},
                              std::optional<int32_t> end = {});
/// The token at which what is generated ends: the tokenizer's end of text, if it has one, in a chat that of a turn; none if
/// config.ignore_end_of_text is set.
std::optional<int32_t> end_of(const Tokenizer& tokenizer, const GenerateConfig& config);

/// Samples from the newest whole checkpoint of a run's output folder, on this process alone, whatever the number of
/// ranks that wrote it, on `device`. `emit` gets the prompt, then the text as it comes, in whole characters: tokens may end
/// inside of one. Throws CheckpointError, DataError.
void generate_from_folder(const std::string& folder, const GenerateConfig& config, Device device,
                          const std::function<void(const std::string&)>& emit);

}  // namespace sheaf::models
