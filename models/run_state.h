// RunState: what a checkpoint stores in addition to tensors, enough to continue a run or to generate from its model.
#pragma once

#include <memory>
#include <optional>

#include "sheaf/core/json.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The tokens of one split, independent of how they are stored.
struct SplitState {
  int64_t tokens = 0;
  std::string xxh3;       ///< of the ids (Tokens::check_all)
  bool of_blocks = true;  ///< if they are many; false in checkpoints from before there were blocks
};

/// The published weights that a run started from.
struct WeightsState {
  std::string path;                  ///< as given
  std::string xxh3;                  ///< PublishedFiles::digest()
  std::vector<int32_t> before = {};  ///< tokens that precede each text (PublishedText); not compared
};

/// The lowest validation loss so far, and after which step it was.
struct BestState {
  int64_t step = 0;
  double val_loss = 0;
  int64_t targets = 0;  ///< of how many; 0 in checkpoints from before it was written
};

struct RunState {
  int64_t step = 0;  ///< optimizer steps done
  int64_t vocab = 0;
  ModelConfig model;
  OptimizationConfig train;                        ///< dtype is "" and micro_batches 0 in checkpoints that lack them
  double val_fraction = 0;                         ///< of a text; 0 for token files
  std::string order = "random";                    ///< of training windows (DataConfig); the former order in checkpoints from before it was
                                               ///< written
  std::shared_ptr<const Tokenizer> tokenizer;      ///< null if the data came as token files
  std::optional<SplitState> train_data, val_data;  ///< none in checkpoints from before they were written
  bool positions_of_documents = true;              ///< learned ones restart in separate documents; false in checkpoints from before this was
                                               ///< written
  std::optional<WeightsState> weights;             ///< none in a run that started from random ones
  std::optional<BestState> best;                   ///< of a run with output.keep_best, once it was validated
  std::string product_choices;                     ///< of a run on GPUs (product_choices.h); else empty, and not written

  Json to_json() const;
  /// Throws CheckpointError if something is missing or of the wrong type.
  static RunState from_json(const Json& json);
};

/// Throws an Error with exit code kResumeMismatch that names the first property in which a run to be continued differs from the
/// checkpoint: whatever affects the values of later steps (the model, the batch, the seed, the schedule, the data and the meaning of
/// their tokens, and the published weights that it started from). Properties that an older checkpoint lacks are not compared. The
/// number of steps may change if the learning rate does not depend on it: under a constant schedule, or if decay_end is unchanged.
/// Evaluation, logging and saving may change freely, and so may the names of files, and micro-batches without model.aux_loss.
void check_resumable(const RunState& saved, const RunState& now);

}  // namespace sheaf::models
