// Sampling text from a language model.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/models/decoder.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The tokens of config.prompt, in a chat with its frame. The default prompt, a newline, is token 0 if the vocabulary has none.
/// Throws ConfigError if it is empty, or for a chat without the special tokens of its format, DataError naming the first character
/// that is not in the vocabulary.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config);
/// The same for `said`, which messages call `origin`: a text or, in a chat, also a list of messages, as in a file. DataError if it is
/// neither, or empty.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config, const Json& said, const std::string& origin);
/// Puts the tokens that precede a text (SavedModel::text) before such a prompt, unless it is a chat's frame, or text with special
/// tokens: these begin as they are meant to.
void begin_as_text(std::vector<int32_t>& prompt, const GenerateConfig& config, std::span<const int32_t> before);

/// Continues `prompt` by config.tokens tokens below `vocab` (a model may have more than the tokenizer knows), with at most `context`
/// of them in view at a time, or until one of `ends` is drawn; returns the new ones without the end. Collective if the model is
/// sharded: every rank computes the same tokens. `emit` gets each token as it is drawn. Each token is read once, until there are more
/// than `context`: then the window slides, all positions in it change, and each new token costs a pass over `context` tokens. Until
/// then MTP layers draft (config.drafts): a pass reads their tokens, too, and accepted drafts need no separate pass. The tokens are
/// the same as without drafts, except for the bits of logits, which on GPUs depend on how many are read. In evaluation mode. Throws
/// NonFiniteError naming the position if logits are NaN or +inf, or all -inf.
std::vector<int32_t> generate(Decoder& model, const std::vector<int32_t>& prompt, int64_t context, int64_t vocab,
                              const GenerateConfig& config, const std::function<void(int32_t)>& emit = {},
                              std::span<const int32_t> ends = {});
/// The tokens at which generation ends: config.end_token, the tokenizer's end of text, if it has one, the `further` ones, such
/// as the one that ended documents or examples in training, and in a chat the end of a turn; with config.ignore_end_of_text only
/// the first. Throws ConfigError for a special token that the tokenizer lacks.
std::vector<int32_t> ends_of(const Tokenizer& tokenizer, const GenerateConfig& config, std::span<const int32_t> further = {});

/// Samples from the newest whole checkpoint of a run's output folder, whatever the number of ranks that wrote it, or from published
/// weights in a folder with their config.json and tokenizer (published_text.h), in this process alone, on `device`. `emit` gets the
/// prompt, then the text as it is generated, in whole characters: tokens may end inside of one. Throws CheckpointError, ConfigError,
/// DataError, NonFiniteError.
void generate_from_folder(const std::string& folder, const GenerateConfig& config, Device device,
                          const std::function<void(const std::string&)>& emit);

}  // namespace sheaf::models
