// Trainer: a whole run. Data, steps, evaluation, metrics, checkpoints, resumption.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "sheaf/core/file_lock.h"
#include "sheaf/models/async_saver.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/corpus.h"
#include "sheaf/models/metrics.h"
#include "sheaf/models/published_files.h"
#include "sheaf/models/published_text.h"
#include "sheaf/models/run_state.h"
#include "sheaf/models/train_config.h"
#include "sheaf/models/training_step.h"
#include "sheaf/models/training_windows.h"

namespace sheaf::models {

struct TrainOptions {
  bool resume = false;  ///< continue from the newest whole checkpoint, from the start if there is none
  std::chrono::seconds lock_patience{120};  ///< how long a run that is resumed waits for another one's lock of the output folder
  /// Called with each console progress line, on rank 0.
  std::function<void(const std::string&)> print = [](const std::string&) {};
  /// Called with each warning, on the rank that notices the problem, maybe by the thread that saves.
  Warn warn = [](const std::string&) {};
};

struct TrainReport {
  int64_t steps = 0;       ///< of the whole run
  int64_t done = 0;        ///< of them, in this process and before a resumption
  int64_t steps_here = 0;  ///< that ran in this process, without those before a resumption
  int stopped_by = 0;      ///< signal that ended it after step `done`, which is saved; the same on all ranks; 0: none
  double train_loss = 0;
  double val_loss = 0;           ///< of all validation sets together
  std::vector<std::pair<std::string, double>> val_losses;  ///< of each that has a name
  std::vector<std::pair<std::string, ChoiceAccuracy>> accuracies;  ///< of each set of questions (data.choices), by its name
  std::optional<BestState> best;  ///< with output.keep_best: the lowest, in this process or before a resumption
  int64_t peak_bytes = 0;        ///< of this rank, in the last step
  std::vector<int64_t> peaks;    ///< of every rank; empty if no step ran in this process
  Tape tape;                     ///< of the last step that ran in this process
};

/// ", of web 3.1, of chat 1.2": of each validation set that has a name.
std::string losses_by_name(const TrainReport& report);
/// "  accuracy of hellaswag 0.2855, norm 0.3112": of each set of questions.
std::string accuracies_by_name(const TrainReport& report);

/// Throws ConfigError if the output folder holds checkpoints, as a run that does not resume must not find any. For programs to call before
/// whatever may fail at their start: a launcher's retry would resume from them as if they were those of its first attempt.
void refuse_earlier_run(const OutputConfig& output);

class Trainer {
 public:
  /// Reads the corpus, builds the model, fills it from published weights or a checkpoint, and checks whether checkpoints can be
  /// written; collective. Rank 0 locks the output folder for as long as this lives. Throws ConfigError, also if another run has the
  /// folder or, unless this one resumes, has left checkpoints there; DataError, IoError, OutOfMemory if a step cannot fit.
  Trainer(const TrainConfig& config, World& world, Device device, const TrainOptions& options = {});

  /// Trains to the end, or until `signal`, called after every step, returns on some rank the number of a signal to end the run: then
  /// all ranks stop after the same step and save it; another call goes on from there. Collective. Throws NonFiniteError if the loss or
  /// the gradient is not finite in a step that is logged or saved: no checkpoint ever holds the result of such a step. In f16 such a
  /// step is skipped, and only many consecutive ones at the smallest loss scale are an error.
  TrainReport run(const std::function<int()>& signal = [] { return 0; });

  TrainingStep& step() { return *step_; }
  const Corpus& corpus() const { return corpus_; }
  /// The given configuration, completed by the data: the vocabulary, and the token that separates documents.
  const TrainConfig& config() const { return config_; }
  /// The same, with what train.recompute "fit" has become: the configuration of step().
  const TrainConfig& fitted() const { return fitted_; }
  const TrainingWindows& windows() const { return windows_; }
  const std::vector<Validation>& validation() const { return validation_; }
  const std::vector<AnsweredQuestions>& questions() const { return questions_; }
  int64_t num_parameters();
  std::string best_folder() const { return config_.output.folder + "/best"; }  ///< of output.keep_best
  bool complete() const { return first_step_ >= config_.train.steps; }         ///< nothing is left to train
  int stopped_by() const { return stopped_by_; }                               ///< TrainReport::stopped_by, also if run() throws

 private:
  class Loop;
  void take_epochs();
  void lock_folder();
  void find_weights();
  void open_questions();
  void load_initial_weights();
  void restore();
  void take_best();
  void take_choices(const RunState& state, const std::string& checkpoint);
  RunState state(int64_t step) const;
  void evaluate(TrainReport& report);
  void save(int64_t step);
  void save_if_best(int64_t step, double val_loss);

  TrainConfig config_, fitted_;
  World& world_;
  Device device_;
  TrainOptions options_;
  Corpus corpus_;
  SplitState train_data_, val_data_;
  std::optional<PublishedFiles> files_;  ///< named by config.model.weights, until they are read
  PublishedText files_text_;             ///< next to them, until it is used
  std::string files_text_error_;         ///< why it could not be read
  std::optional<WeightsState> weights_;  ///< that the run started from
  TrainingWindows windows_;
  int64_t num_val_targets() const;

  std::vector<Validation> validation_;
  std::vector<AnsweredQuestions> questions_;
  std::unique_ptr<FileLock> lock_;  ///< on rank 0
  std::unique_ptr<TrainingStep> step_;
  int64_t first_step_ = 0;
  std::vector<int64_t> abandoned_;  ///< steps of checkpoints that were too broken to resume from, and are still there
  std::optional<BestState> best_;
  int stopped_by_ = 0;  ///< the signal that ends run(), on all ranks; 0: none
  AsyncSaver saver_;  ///< idle without train.save_async
};

}  // namespace sheaf::models
