// LanguageModel: what the trainer needs of a model, so that it does not care which one it is.
#pragma once

#include <memory>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/forward_progress.h"
#include "sheaf/models/train_config.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/module.h"

namespace sheaf::models {

class LanguageModel {
 public:
  virtual ~LanguageModel() = default;
  virtual nn::Module& module() = 0;
  /// Sum of the cross-entropies of the targets, in nats, divided by `divide_by`. tokens, targets: i32[B, T], targets −1
  /// are ignored. Partial over the axes that cut them or the model.
  virtual Tensor loss(const Tensor& tokens, const Tensor& targets, double divide_by) = 0;
  /// loss() in parts: on from `at` to before block `until`, and from the last block to the loss, which is undefined before.
  virtual Tensor loss_until(int64_t /*until*/, ForwardProgress& /*at*/, const Tensor& /*tokens*/, const Tensor& /*targets*/,
                            double /*divide_by*/) {
    fail<ConfigError>("[model] the forward of this model has no parts (LanguageModel::loss_until)");
  }
  /// [B, 1, vocab]: logits of the token after these, which come after those that `cache` has read.
  virtual Tensor next_logits(const Tensor& tokens, nn::KeyValueCache& cache) = 0;
  /// Picks the modules that become units of their own: the transformer blocks.
  virtual bool is_block(const nn::Module& module) const = 0;
  /// The stage of a pipeline that `module` is in, or -1: blocks as `cut` says, a token table that is no head in the first, such a
  /// head in the last.
  virtual int stage_of(const nn::Module& /*module*/, const StageCut& /*cut*/) const { return -1; }
};

/// Builds the model that `config` describes, without memory. `vocab` replaces config.vocab where that is 0.
/// Throws ConfigError.
std::unique_ptr<LanguageModel> make_language_model(const ModelConfig& config, int64_t vocab);

}  // namespace sheaf::models
