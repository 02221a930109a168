// Prompts in JSON lines, and a model's continuations of them: another file of JSON lines.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "sheaf/distributed/world.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

struct GenerateLinesOptions {
  std::string prompts;                  ///< file of JSON lines, an object each
  std::string prompt_field = "prompt";  ///< the member that is a prompt: a text or, in a chat, also a list of messages
  std::string output;                   ///< file to write: the same lines, in their order, with the continuation of each prompt
  std::string field = "completion";     ///< the member of these lines that holds the continuation
  int64_t samples = 1;                  ///< continuations of each prompt, in consecutive lines
  int64_t at_once = 32;                 ///< sequences that each rank reads together
  bool resume = false;                  ///< continue after the existing lines
};

struct GenerateLinesProgress {
  int64_t done = 0, all = 0;      ///< continuations in the output
  int64_t tokens = 0, ended = 0;  ///< of those generated now: tokens, and continuations that ended before their maximum
};

/// Continues each prompt as config.generate says, by the newest whole checkpoint of a run's output folder or by published weights,
/// and appends lines as they are generated, whole ones even if the process is killed: each with the members of its prompt's line,
/// `field`, "ended" (whether it ended before reaching its maximum length) and, with several samples, "sample", its number. A line
/// depends on its prompt, its number and the seed, not on the number of ranks nor on at_once (see generate_many.h). The ranks of
/// `world` share the lines; with config.sharding also the weights, which are stored in generate.dtype. Collective. `progress` is
/// called on every rank, when all input has been read and then after every few batches. With `resume` the last existing line, and a
/// partial one left by a kill, must match the prompts at their positions; which model and seed generated them is not known. Throws
/// ConfigError, also if the output exists without `resume`, DataError naming the line, CheckpointError, IoError, NonFiniteError
/// naming the prompt.
GenerateLinesProgress generate_lines(const std::string& folder, TrainConfig config, World& world, Device device, const GenerateLinesOptions& options,
                                     const std::function<void(const GenerateLinesProgress&)>& progress = {});

}  // namespace sheaf::models
