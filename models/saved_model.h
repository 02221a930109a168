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
  ModelConfig model;  ///< vocab may be 0; it can also be loaded with fewer MTP layers
  int64_t vocab = 0;
  PublishedText text = {};                  ///< its text conventions; without a tokenizer if none is known
  std::string no_tokenizer = {};            ///< if there is none: why, or
  std::exception_ptr unreadable = {};       ///< the exception from reading it
  std::string origin = {};                  ///< path of the checkpoint or the weights
  std::string digest = {};                  ///< of the files' content, to compare among ranks
  std::function<void(Decoder&)> load = {};  ///< fills a materialized model, which may be sharded over the ranks of the group

  /// Stores its matrices in these blocks; "none": as saved. ConfigError, prefixed with `who`, if it was saved with others.
  void quantize(const char* who, const std::string& format);
  /// If there is no tokenizer, throws the exception from reading it, or ConfigError; `who` names what needs it.
  void expect_tokenizer(const std::string& who) const;
};

/// Whether `folder` has published weights, rather than a run's checkpoints.
bool has_published_weights(const std::string& folder);
/// The newest whole checkpoint of a run's output folder, or published weights in a folder with their config.json. Collective over
/// `group`. Throws CheckpointError, prefixed with `who`, if it is neither, or is invalid; ConfigError, DataError.
SavedModel open_saved_model(const char* who, const std::string& folder, const CheckpointGroup& group = {});

}  // namespace sheaf::models
