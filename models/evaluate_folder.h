// Evaluating an existing model: its loss on tokens, and how many questions it answers correctly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/distributed/world.h"
#include "sheaf/models/choices.h"
#include "sheaf/models/train_config.h"
#include "sheaf/models/validation_sets.h"

namespace sheaf::models {

struct EvaluateOptions {
  int64_t context = 0;      ///< tokens of a window; 0: the model's context, but at most 4096
  bool whole_text = false;  ///< of data.corpus, instead of its tail (data.val_fraction)
};

struct EvaluationReport {
  std::string model;  ///< path of the checkpoint or the weights
  int64_t parameters = 0;
  int64_t context = 0;  ///< tokens of a window
  std::vector<Validation> validation = {};
  std::vector<AnsweredQuestions> questions = {};
};

/// Evaluates the newest whole checkpoint of a run's output folder, or published weights in a folder, on the data that [data] of
/// `config` names: val_file or corpus, if there is one, and choices. It uses batch, micro_batches, dtype, eval_tokens and
/// eval_questions of [train], and [sharding], by which the model, whose weights are stored in the compute dtype, is sharded over the
/// ranks of `world`. Collective, the same on every rank. Throws ConfigError, also if there is nothing to evaluate on or ranks found
/// different files, CheckpointError, DataError, NonFiniteError.
EvaluationReport evaluate_folder(const std::string& folder, TrainConfig config, World& world, Device device,
                                 const EvaluateOptions& options = {});

}  // namespace sheaf::models
