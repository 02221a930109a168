// Continuations of many prompts at once: for learning from rewards, answering a file of questions, or writing a corpus.
//
//   B sequences that are read together   T tokens
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/core/placement.h"
#include "sheaf/models/decoder.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

struct Continuation {
  std::vector<int32_t> tokens = {};  ///< after the prompt; without the end token
  bool ended = false;                ///< one of the ends was drawn: else it has its maximum length
};

struct GenerateManyOptions {
  int64_t context = 0;  ///< most tokens that are read of a prompt with its continuation, whose last one is not: at most the model's
  int64_t vocab = 0;    ///< only tokens below are drawn
  std::span<const int32_t> ends = {};
  int64_t at_once = 32;  ///< sequences that each rank reads together
  /// How sequences are placed on the ranks of a sharded model, such as Shard(0)@data: each rank has its own prompts, any number of
  /// them, except that some ranks, such as those of a tensor axis, hold the same ones. Without a mesh all ranks have the same.
  Layout rows = {};
  int64_t first = 0;  ///< number of this rank's first prompt among all: draws depend on it
};

/// The continuation of each of `prompts`, drawn as `config` says: up to config.tokens tokens (the text, chat and drafts of `config`
/// are not used), and none for which more than `context` would have to be read. A prompt's continuation depends on it, its number and
/// the seed, on CPUs to the bit, not on other prompts, at_once or the ranks (except for linear attention, whose rounding depends on
/// them, and a tensor axis); number 0 gets the result of generate(). Prompts of similar lengths are read together, the shorter ones
/// after padding; when half of the sequences have ended, their memory and work are released. Collective if the model is sharded: each
/// pass gathers its units, unless they are kept (nn/unsharded.h). Outside of any recording, in evaluation mode. Throws
/// ConfigError for a prompt that is empty or longer than `context`, or if `context` is larger than the model's; NonFiniteError as
/// generate() does, with the number of the prompt.
std::vector<Continuation> generate_many(Decoder& model, std::span<const std::vector<int32_t>> prompts, const GenerateConfig& config,
                                        const GenerateManyOptions& options);

}  // namespace sheaf::models
