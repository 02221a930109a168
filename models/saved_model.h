// SavedModel: an existing model to be used, from a run's folder or as published weights.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/decoder.h"
#include "sheaf/models/published_text.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

struct SavedModel {
  ModelConfig model;                       ///< vocab may be 0; with fewer MTP layers it loads, too
  int64_t vocab = 0;
  PublishedText text = {};                 ///< what it reads and writes; without a tokenizer where none is known
  std::string no_tokenizer = {};           ///< where it is unknown: why, or
  std::exception_ptr unreadable = {};      ///< what reading it has thrown
  std::string origin = {};                 ///< path of the checkpoint or the weights
  std::string digest = {};                 ///< of the files' content, to compare among ranks
  std::function<void(Decoder&)> load = {};  ///< fills a materialized model, which may be cut over the ranks of the group

  /// Lets its matrices rest in these blocks; "none": as it says itself. ConfigError, in the name of `who`, if it has others.
  void quantize(const char* who, const std::string& format);
  /// Throws what reading it has thrown, or ConfigError, if there is no tokenizer for what `who` names.
  void expect_tokenizer(const std::string& who) const;
};

/// Whether `folder` has published weights, rather than a run's checkpoints.
bool has_published_weights(const std::string& folder);
/// The newest whole checkpoint of a run's output folder, or published weights in a folder with their config.json. Collective over
/// `group`. Throws CheckpointError if it is neither, in the name of `who`, or for what is wrong there; ConfigError, DataError.
SavedModel open_saved_model(const char* who, const std::string& folder, const CheckpointGroup& group = {});

}  // namespace sheaf::models
