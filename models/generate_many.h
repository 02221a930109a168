// Continuations of many prompts at once, as one needs them to learn from rewards, to answer a file of questions, or to write a corpus.
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
  std::vector<int32_t> tokens = {};  ///< behind the prompt; the end left out
  bool ended = false;                ///< one of the ends was drawn: else it is as long as it may be
};

struct GenerateManyOptions {
  int64_t context = 0;               ///< most tokens that are read of a prompt with its continuation: at most the model's
  int64_t vocab = 0;                 ///< tokens below are drawn
  std::span<const int32_t> ends = {};
  int64_t at_once = 32;              ///< sequences that each rank reads together
  /// How sequences lie on the ranks of a sharded model, such as Shard(0)@data: each rank has prompts of its own, of whatever number, but those that
  /// hold the same ones, such as ranks of a tensor axis. Without a mesh all ranks have the same.
  Layout rows = {};
  int64_t first = 0;                 ///< number of this rank's first prompt among all: what is drawn depends on it
};

/// What follows each of `prompts`, drawn as `config` says: up to config.tokens tokens (the text, chat and drafts of `config` are not used), and none
/// for which more than `context` would have to be read. What a prompt gets depends on it, its number and the seed, on CPUs to the bit, not
/// on those beside it, nor on at_once and the ranks (but for linear attention, which rounds by them, and a tensor axis); number 0 gets what generate() gives. Prompts of like lengths are read together, the shorter
/// ones behind padding; of half of the sequences that end the memory and the work are given back. Collective where the model is sharded: each
/// pass gathers its units, unless they are kept (nn/unsharded.h). Outside of any recording; leaves the model in eval(). Throws
/// ConfigError for a prompt that is empty or longer than `context`, or that for more than the model's; NonFiniteError as generate() does, with the number of
/// the prompt.
std::vector<Continuation> generate_many(Decoder& model, std::span<const std::vector<int32_t>> prompts, const GenerateConfig& config,
                                        const GenerateManyOptions& options);

}  // namespace sheaf::models
