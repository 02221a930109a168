// TrainingStep: model, optimizer and one step of training, nothing else. The trainer runs it on data; a plan runs it on the meta
// device, where it has the same tape and takes the same bytes.
//
// [Note: a step as a graph] With train.cuda_graph, on a GPU, the third step is captured while it is recorded, and from then on
// replayed: one copy of its inputs, one launch. The two before it run as usual, so that memory, the order of gathers and the
// libraries' choices have settled. Host counters (steps, samples) continue separately; all other inputs of a step are in StepInputs.
// Anything else that runs between replays uses separate memory.
//
// [Note: a step as a program] With train.compile the third step's tape is prepared to run again (autograd/program.h), and from then
// on runs in one arena: no op is called, placed or recorded again. Within sharding.memory_budget units stay gathered there. A graph
// captures such a run.
//
// [Note: steps of islands] With train.islands a step is one of this rank's island, on its part of the batch: nothing in it, neither
// its tape nor a program nor a graph, depends on the others. After every train.inner_steps, and after the last step, follows an outer
// step (nn/optim/diloco.h).
//
// On GPUs the collectives of the first step, and of the first evaluation, run one after another, with nothing running concurrently
// (distributed/in_turn.h).
//
// [Note: products are timed once] With train.tune_products, on a GPU, the first step times the algorithms of its products, and the
// ranks share the choices (product_choices.h). Choices from a checkpoint count as timed.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include "sheaf/autograd/program.h"
#include "sheaf/core/gpu.h"
#include "sheaf/distributed/world.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/evaluation.h"
#include "sheaf/models/step_inputs.h"
#include "sheaf/nn/optim/diloco.h"
#include "sheaf/nn/optim/loss_scaler.h"
#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::models {

/// A step as a value: its tape and, if requested, the values that a replay starts from.
struct RecordedStep {
  bool capture_leaves = false;  ///< set by the caller
  Tape tape;
  std::unordered_map<ValueId, Tensor> leaves;  ///< copies of their values before the step
  std::unordered_map<ValueId, Tensor> memory;  ///< the leaves themselves, as long as this lives
  ValueId loss = -1, grad_norm = -1, mtp = -1, grad_norms = -1;
  Reruns reruns;
  std::vector<NodeId> turns;                  ///< the first node of each turn, and of the part after the last
};

/// A shorter step that a plan records instead of a rank's: an estimate repeats its parts (step_time.h).
struct StandIn {
  std::vector<Turn> turns = {};      ///< empty: those of the rank's stage
  std::vector<int64_t> blocks = {};  ///< of each run of each stage; empty: the model's own division
};

struct TrainingStepOptions {
  DType masters = kF32;  ///< f64 to compare ways of training: train.dtype f32 then computes in it, too
  StandIn stand_in = {};
  bool overlap = true;  ///< false, for comparison: RecordingOptions::overlap
  /// How many of the targets of samples [first, first + count) count, a number above 0; null: all do. Needed with data.examples.
  std::function<int64_t(int64_t first, int64_t count)> num_targets = {};
};

class TrainingStep {
 public:
  /// Builds, shards and materializes the model on `device`; collective over `world`. ConfigError for train.cuda_graph if there is no
  /// GPU, or if ranks communicate in a way that graphs cannot contain.
  TrainingStep(const TrainConfig& config, int64_t vocab, World& world, Device device, const TrainingStepOptions& options = {});

  struct Result {
    Tensor loss;       ///< mean over the step's targets that count, of this rank's island, f32, whole on every rank of it
    Tensor grad_norm;  ///< of its gradient, before clipping; in f16 not finite if the step was skipped
    double lr = 0;
    Tensor mtp = {};         ///< the mean loss of the model's MTP layers, if it has some; `loss` contains it times model.mtp_loss
    Tensor grad_norms = {};  ///< of each of trained() (sheaf::grad_norms), with train.log_norms
  };
  /// One optimizer step: forward and backward of every micro-batch, clipping, update. If `recorded` is given, the step is stored
  /// there; with leaves to capture it does not run as a graph. A graph's next run overwrites the tensors of the result. With islands
  /// an outer step follows if one is due.
  Result run(int64_t step, const FillBatch& fill, RecordedStep* recorded = nullptr);
  /// The outer step of islands, while no values of a program are in memory.
  void outer_step();
  /// Means of these values over islands that have them, in place.
  void mean_over_islands(std::span<double> values) const;
  /// Mean loss over all windows, in nats per target; collective, the same on every rank.
  double evaluate(const SequentialWindows& windows);
  /// For each row, as in evaluation.h; collective, the same on every rank.
  std::vector<double> log_likelihoods(const ChoiceQuestions& questions);

  /// The program that runs the steps, once there is one (train.compile).
  const Program* program() const { return program_.get(); }

  Decoder& model() { return *sharded_.model; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  /// For a run in f16; else null.
  optim::LossScaler* scaler() { return scaler_ ? &*scaler_ : nullptr; }
  /// With train.islands; else null.
  optim::DiLoCo* outer() { return outer_ ? &*outer_ : nullptr; }
  World& world() { return world_; }
  const Mesh& mesh() const { return sharded_.mesh; }  ///< of this rank's island
  /// Of all ranks.
  const Mesh& all() const { return sharded_.islands.spec ? sharded_.islands : sharded_.mesh; }
  const StepInputs& inputs() const { return *inputs_; }
  const StageCut& cut() const { return sharded_.cut; }
  int64_t num_parameters();  ///< elements of the whole model
  int64_t num_trained();     ///< of them those that are not frozen
  std::vector<nn::Parameter> trained();  ///< those with a gradient: neither frozen nor steered
  int64_t tokens_per_step() const { return sharded_.num_islands() * tokens_of_island(); }  ///< of all islands
  /// Learning rate of step `step` (0 is the first).
  double learning_rate(int64_t step) const;

 private:
  /// Of this rank's island, whose batches alternate with those of the others.
  int64_t first_sample(int64_t step) const;
  Result record(int64_t step, double lr, RecordedStep* recorded);
  void run_turns(Recording& recording, Result& result, RecordedStep* recorded);
  void update(Result& result);
  static void keep(Recording& recording, const Result& result, RecordedStep& recorded);
  Result record_first(int64_t step, double lr, RecordedStep* recorded);
  Result compile(int64_t step, double lr, RecordedStep* recorded);
  Result run_program(double lr, RecordedStep* recorded);
  Result replay(int64_t step, double lr, RecordedStep* recorded);
  bool runs_as_graph(const RecordedStep* recorded) const;
  void release_program();
  void prepare_evaluation();
  int64_t tokens_of_island() const { return config_.train.batch * config_.model.context; }

  TrainConfig config_;  // of this rank's island
  World& world_;
  Device device_;
  bool overlap_;
  std::function<int64_t(int64_t first, int64_t count)> num_targets_;
  ShardedModel sharded_;
  std::vector<Turn> turns_;  // of a step
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<optim::LossScaler> scaler_;
  std::optional<optim::DiLoCo> outer_;
  std::unique_ptr<StepInputs> inputs_;
  int64_t runs_ = 0;
  bool first_evaluation_ = true, first_questions_ = true, first_outer_step_ = true;
  std::unique_ptr<Program> program_;
  RecordedStep compiled_;  // that of program_: the parts still needed; the rest was moved there
  Result captured_;        // what every replay writes
  RecordedStep captured_step_;
  std::unique_ptr<GpuGraph> graph_;
};

}  // namespace sheaf::models
