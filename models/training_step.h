// TrainingStep: model, optimizer and one step of training, with nothing around it. The trainer runs it on data; a plan
// runs it on the meta device, where it has the same tape and takes the same bytes.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>

#include "sheaf/autograd/tape.h"
#include "sheaf/distributed/world.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/language_model.h"
#include "sheaf/nn/optim/adamw.h"

namespace sheaf::models {

/// Writes samples [first, first + count) of the run: inputs and targets, each [count, context].
using FillBatch = std::function<void(int64_t first, int64_t count, int32_t* inputs, int32_t* targets)>;

/// A step as a value: its tape and, if asked for, what a replay starts from.
struct RecordedStep {
  bool capture_leaves = false;                   ///< set by the caller
  Tape tape;
  std::unordered_map<ValueId, Tensor> leaves;    ///< copies, as they were before the step
  ValueId loss = -1, grad_norm = -1;
};

class TrainingStep {
 public:
  /// Builds, shards and materializes the model on `device`; collective over `world`.
  TrainingStep(const TrainConfig& config, int64_t vocab, World& world, Device device);

  struct Result {
    Tensor loss;       ///< mean over the step's targets, f32, whole on every rank
    Tensor grad_norm;  ///< before clipping
    double lr = 0;
  };
  /// One optimizer step: forward and backward of every micro-batch, clipping, AdamW. If `recorded` is given, the
  /// step is left there.
  Result run(int64_t step, const FillBatch& fill, RecordedStep* recorded = nullptr);
  /// Mean loss over all windows, in nats per target; collective, the same on every rank.
  double evaluate(const SequentialWindows& windows);

  LanguageModel& model() { return *model_; }
  optim::AdamW& optimizer() { return *optimizer_; }
  World& world() { return world_; }
  const Mesh& mesh() const { return mesh_; }
  int64_t tokens_per_step() const { return config_.train.batch * config_.model.context; }
  /// Learning rate of step `step` (0 is the first).
  double learning_rate(int64_t step) const;

 private:
  struct Batch { Tensor tokens, targets; };
  Batch make_batch(int64_t rows, int64_t first, const FillBatch& fill);

  TrainConfig config_;
  World& world_;
  Device device_;
  Mesh mesh_;
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

}  // namespace sheaf::models
