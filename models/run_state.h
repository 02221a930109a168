// RunState: what a checkpoint says besides tensors, enough to go on with a run or to generate from its model.
#pragma once

#include <memory>

#include "sheaf/core/json.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

struct RunState {
  int64_t step = 0;                            ///< optimizer steps done
  int64_t vocab = 0;
  ModelConfig model;
  OptimizationConfig train;
  std::shared_ptr<const Tokenizer> tokenizer;  ///< null if the data came as token files
  std::string product_choices;                 ///< of a run on GPUs (product_choices.h); else empty, and not written

  Json to_json() const;
  /// Throws CheckpointError if something is missing or of the wrong type.
  static RunState from_json(const Json& json);
};

/// Throws an Error with exit code kResumeMismatch that names the first option in which a run that is to be continued
/// differs from the checkpoint: what decides the values of later steps (the model, the batch, the seed, the schedule,
/// what the tokens mean). `tokenizer` is null if the data come as token files. The number of steps may grow only under a
/// constant schedule; evaluation, logging and saving may change freely.
void check_resumable(const RunState& saved, const TrainConfig& config, int64_t vocab, const Tokenizer* tokenizer);

}  // namespace sheaf::models
