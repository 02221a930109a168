// RunState: what a checkpoint says besides tensors, enough to go on with a run or to generate from its model.
#pragma once

#include <memory>
#include <optional>

#include "sheaf/core/json.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The tokens of one split, wherever and however they are stored.
struct SplitState {
  int64_t tokens = 0;
  std::string xxh3;  ///< of the ids (Tokens::check_all)
  bool operator==(const SplitState&) const = default;
};

/// The published weights that a run started from.
struct WeightsState {
  std::string path;  ///< as it was given
  std::string xxh3;  ///< PublishedFiles::digest()
  std::vector<int32_t> before = {};  ///< tokens that precede each text (PublishedText); not compared
};

/// The lowest validation loss so far, and after which step it was.
struct BestState {
  int64_t step = 0;
  double val_loss = 0;
};

struct RunState {
  int64_t step = 0;                            ///< optimizer steps done
  int64_t vocab = 0;
  ModelConfig model;
  OptimizationConfig train;                    ///< dtype is "" in checkpoints from before it was written
  double val_fraction = 0;                     ///< of a text; 0 for token files
  std::string order = "random";                ///< of training windows (DataConfig); what it was before it was written
  std::shared_ptr<const Tokenizer> tokenizer;  ///< null if the data came as token files
  std::optional<SplitState> train_data, val_data;  ///< none in checkpoints from before they were written
  bool positions_of_documents = true;          ///< learned ones begin anew in separate documents; where this is not written they did not
  std::optional<WeightsState> weights;         ///< none in a run that started from random ones
  std::optional<BestState> best;               ///< of a run with output.keep_best, once it was validated
  std::string product_choices;                 ///< of a run on GPUs (product_choices.h); else empty, and not written

  Json to_json() const;
  /// Throws CheckpointError if something is missing or of the wrong type.
  static RunState from_json(const Json& json);
};

/// Throws an Error with exit code kResumeMismatch that names the first thing in which a run that is to be continued differs from the
/// checkpoint: whatever decides the values of later steps (the model, the batch, the seed, the schedule, the data and what their tokens
/// mean, and the published weights that it started from). What an older checkpoint does not say is not compared. The number of steps may
/// change where the learning rate does not follow it: under a constant schedule, or where decay_end stays. Evaluation, logging and saving
/// may change freely, and so may the names of files.
void check_resumable(const RunState& saved, const RunState& now);

}  // namespace sheaf::models
