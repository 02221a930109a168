// The loop of a run: a step, the exchange of news between ranks, and then a line, an evaluation, a checkpoint, when they are due.
#include <chrono>
#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/event_file.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/norm_metrics.h"
#include "sheaf/models/step_news.h"
#include "sheaf/models/step_profile.h"
#include "sheaf/models/trainer.h"

namespace sheaf::models {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double unsigned_nan(double x) { return std::isnan(x) ? std::abs(x) : x; }

}  // namespace

class Trainer::Loop {
 public:
  Loop(Trainer& trainer, const std::function<int()>& signal)
      : trainer_(trainer), train_(trainer.config_.train), step_(*trainer.step_), world_(trainer.world_),
        first_rank_(world_.rank() == 0), signal_(signal), memory_(*RankContext::current().memory(trainer.device_)),
        news_(world_.size() > 1 ? &world_.communicator() : nullptr, world_.rank(), world_.size()) {
    const int64_t first = trainer_.first_step_;
    trainer_.stopped_by_ = 0;
    if (first_rank_) {
      const OutputConfig& output = trainer_.config_.output;
      metrics_ = std::make_unique<MetricsWriter>(output.folder + "/metrics.jsonl", first - (first == 0));
      if (output.tensorboard) events_ = std::make_unique<EventFile>(output.folder + "/tensorboard", first + 1);
    }
    wait_for_all(world_);  // the first step has a deadline, rank 0's files have none
    if (step_.scaler()) skipped_ = step_.scaler()->state().skipped_steps;
    report_.steps = train_.steps;
    report_.done = first;
  }

  TrainReport run() {
    for (int64_t done = report_.done + 1; done <= train_.steps && report_.stopped_by == 0; ++done) {
      const bool last = done == train_.steps, logs = last || done % train_.log_every == 0;
      const TrainingStep::Result result = step(done, last);
      hear_from_others(logs);
      const bool saves = last || report_.stopped_by != 0 || is_due(train_.save_every, done);
      if (logs || saves) read(result);
      if (logs) log(result);
      if (last || is_due(train_.eval_every, done)) evaluate();
      if (saves) save();
    }
    trainer_.saver_.finish();
    if (trainer_.complete()) {  // report the finished run
      if (first_rank_) trainer_.options_.print(nothing_to_train());
      if (step_.outer()) step_.outer()->go_back();  // in the middle of a round: islands have one model to evaluate
      trainer_.evaluate(report_);
    }
    trainer_.first_step_ = report_.done;  // from where another run() would go on
    report_.peak_bytes = report_.peaks.empty() ? 0 : report_.peaks[static_cast<size_t>(world_.rank())];
    if (trainer_.config_.output.keep_best) report_.best = trainer_.best_;
    report_.tape = std::move(recorded_.tape);
    return std::move(report_);
  }

 private:
  // The report of a run that has done all of its steps, and how to extend it.
  std::string nothing_to_train() const {
    const int64_t done = trainer_.first_step_;
    const bool of_epochs = train_.epochs > 0;
    std::string text = str("the run is complete at step ", done, ": nothing is left to train, as ",
                           of_epochs ? str("train.epochs ", train_.epochs, " are ", train_.steps, " steps") : str("train.steps is ", train_.steps));
    if (done == 0) return text;
    text += str("; to go on, give ", of_epochs ? str("a larger --train.epochs") : str("--train.steps above ", done));
    if (const OptimizationConfig r = resolved(train_); train_.decay_end == 0 && r.decay_start < r.decay_end)
      text += str(" and --train.decay_end ", train_.steps, ", after which the learning rate stays at train.min_lr");
    return text;
  }

  static bool is_due(int64_t every, int64_t done) { return every > 0 && done % every == 0; }

  TrainingStep::Result step(int64_t done, bool last) {
    memory_.reset_peak();
    const bool compiled = step_.program();
    std::optional<StepProfile> profile;
    if (done == trainer_.config_.output.trace_step) profile.emplace(world_);
    const FillBatch fill = [this](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
      trainer_.windows_.fill(first, count, inputs, targets);
    };
    TrainingStep::Result result = step_.run(done - 1, fill, last ? &recorded_ : nullptr);
    if (profile) write_profile(*profile, done);
    if (step_.program() && !compiled) report_program(*step_.program());
    trainer_.saver_.check();
    report_.done = done;
    ++report_.steps_here;
    ++steps_since_;
    return result;
  }

  void write_profile(StepProfile& profile, int64_t done) const {
    const std::string file = trainer_.config_.output.folder + "/trace.json";
    try {
      const std::string shares = profile.write(file);
      if (first_rank_) trainer_.options_.print(str("step ", done, " took rank 0 ", shares, "; its time line is in ", file));
    } catch (const IoError& error) {
      trainer_.options_.warn(str(error.what(), "; training goes on without it"));
    }
    wait_for_all(world_);  // while rank 0 writes
  }

  void report_program(const Program& program) const {
    int64_t takes = memory_.stats().live + program.arena_bytes();
    const int64_t budget = trainer_.config_.sharding.memory_budget;
    if (budget > 0) world_.communicator().all_reduce(&takes, 1, kI64, Reduction::max, "bytes of a step").sync();
    if (!first_rank_) return;
    trainer_.options_.print(
        str("steps from here on are a program of ", program.tape().num_nodes(), " nodes in an arena of ", format_bytes(program.arena_bytes()),
            budget > 0 && takes > budget ? str("; a step takes a rank ", takes, " bytes, more than sharding.memory_budget") : ""));
  }

  // On GPUs only where the host waits anyway: a replayed graph and the lane must use the communicator in one order on all ranks.
  void hear_from_others(bool logs) {
    heard_ = std::max(heard_, signal_());
    const bool waits = logs || world_.size() == 1;
    if (!waits && (!trainer_.device_.is_cpu() || train_.islands > 1)) return;  // nor do islands wait for each other in between
    news_.receive();  // of the step before
    const int told = news_.signal();
    news_.send(memory_.stats().peak, heard_);
    if (!waits && told == 0) return;
    news_.receive();
    report_.stopped_by = trainer_.stopped_by_ = std::max(told, news_.signal());
  }

  // Before anything is saved: no checkpoint holds the result of a step with a gradient that is not finite.
  void read(const TrainingStep::Result& result) {
    double means[] = {result.loss.item<double>(), result.grad_norm.item<double>(), result.mtp ? result.mtp.item<double>() : 0.0};
    step_.mean_over_islands(means);
    grad_norm_ = means[1], mtp_loss_ = means[2];
    if (result.grad_norms) norms_ = norm_metrics(step_, result.grad_norms, train_.log_norms == "parameters");
    report_.train_loss = means[0] - trainer_.config_.model.mtp_loss * mtp_loss_;
    const double norm = grad_norm_;
    if (step_.scaler() && !std::isfinite(norm)) return check_lost_steps();
    if (std::isfinite(report_.train_loss) && std::isfinite(norm)) return;
    diverged("loss ", unsigned_nan(report_.train_loss), ", gradient norm ", norm,
             train_.clip > 0 ? "; a smaller train.lr or train.clip may help" : "; a smaller train.lr or a train.clip above 0 may help");
  }

  template <class... Parts>
  [[noreturn]] void diverged(const Parts&... parts) {
    trainer_.saver_.finish();  // what it saves is of a step before, which was finite
    fail<NonFiniteError>("[train] step ", report_.done, ": ", parts...);
  }

  // In f16 the gradient may be infinite, which costs a step, but not at every scale.
  void check_lost_steps() {
    constexpr int64_t kMost = 20;
    const optim::LossScaler::State state = step_.scaler()->state();
    if (state.lost_steps < kMost) return;
    diverged("the gradient was not finite in ", state.lost_steps, " steps in a row, though the loss scale is at its minimum, ",
             state.factor, "; a smaller train.lr, or train.dtype bf16 or f32, may help");
  }

  void log(const TrainingStep::Result& result) {
    report_.peaks = news_.peaks();
    if (first_rank_) write_line(result);
    since_ = now();
    steps_since_ = 0;
  }

  void write_line(const TrainingStep::Result& result) {
    const int64_t done = report_.done;
    const double norm = grad_norm_;
    const double tokens_per_second = static_cast<double>(step_.tokens_per_step() * steps_since_) / (now() - since_);
    std::vector<Metric> values{{"loss", report_.train_loss}, {"lr", result.lr}, {"grad_norm", norm},
                               {"tokens", step_.tokens_per_step() * done}, {"seconds", now() - start_},
                               {"tokens_per_second", tokens_per_second}, {"peak_bytes", std::ranges::max(report_.peaks)}};
    if (result.mtp) values.push_back({"mtp_loss", mtp_loss_});
    values.insert(values.end(), norms_.begin(), norms_.end());
    const double each = (now() - start_ - beside_) / static_cast<double>(report_.steps_here);
    Progress progress{.step = done, .steps = train_.steps, .loss = report_.train_loss, .lr = result.lr, .grad_norm = norm,
                      .tokens_per_second = tokens_per_second, .seconds_left = each * static_cast<double>(train_.steps - done)};
    if (const optim::LossScaler* scaler = step_.scaler()) {
      const optim::LossScaler::State state = scaler->state();
      values.push_back({"loss_scale", state.factor}), values.push_back({"skipped_steps", state.skipped_steps});
      progress.loss_scale = state.factor;
      progress.skipped = state.skipped_steps - std::exchange(skipped_, state.skipped_steps);
      progress.steps_since = steps_since_;
    }
    write(values);
    trainer_.options_.print(progress_line(progress));
  }

  void write(std::span<const Metric> values) {
    metrics_->write(report_.done, values);
    if (events_) events_->write(report_.done, values);
  }

  void evaluate() {
    const double begin = now();
    try {
      trainer_.evaluate(report_);
    } catch (const NonFiniteError& error) {
      diverged(error.what());
    }
    if (first_rank_) {
      std::vector<Metric> values{{"val_loss", report_.val_loss}};
      for (const auto& [name, loss] : report_.val_losses) values.push_back({"val_loss_" + name, loss});
      for (const auto& [name, of] : report_.accuracies) {
        const std::string suffix = name.empty() ? "" : "_" + name;
        values.push_back({"accuracy" + suffix, of.accuracy}), values.push_back({"norm_accuracy" + suffix, of.accuracy_norm});
      }
      write(values);
      trainer_.options_.print(str("step ", report_.done, "  validation loss ", report_.val_loss, losses_by_name(report_),
                                  accuracies_by_name(report_)));
    }
    if (!std::isfinite(report_.val_loss)) diverged("validation loss ", unsigned_nan(report_.val_loss), losses_by_name(report_));
    trainer_.save_if_best(report_.done, report_.val_loss);
    leave_out(begin);
  }

  void save() {
    const double begin = now();
    if (first_rank_) metrics_->sync();
    trainer_.save(report_.done);
    leave_out(begin);
  }

  // Excludes evaluations and saves from the speed.
  void leave_out(double begin) {
    const double seconds = now() - begin;
    beside_ += seconds;
    since_ += seconds;
  }

  Trainer& trainer_;
  const OptimizationConfig& train_;
  TrainingStep& step_;
  World& world_;
  const bool first_rank_;
  const std::function<int()>& signal_;
  int heard_ = 0;  // the signal that it reported
  Allocator& memory_;
  StepNews news_;
  std::unique_ptr<MetricsWriter> metrics_;  // on rank 0
  std::unique_ptr<EventFile> events_;       // null unless asked for
  TrainReport report_;
  RecordedStep recorded_;                // the last step
  double grad_norm_ = 0, mtp_loss_ = 0;  // of the last step that was read
  std::vector<Metric> norms_;            // of that, with train.log_norms
  int64_t skipped_ = 0;                  // steps, up to the last line
  const double start_ = now();
  double since_ = start_;    // the last line, excluding evaluations and saves
  double beside_ = 0;        // seconds of evaluations and saves
  int64_t steps_since_ = 0;  // the last line
};

void Trainer::evaluate(TrainReport& report) {
  report.val_losses.clear();
  for (Validation& v : validation_) {
    v.loss = step_->evaluate(v.windows);
    if (!v.name.empty()) report.val_losses.emplace_back(v.name, v.loss);
  }
  report.val_loss = mean_loss(validation_);
  report.accuracies.clear();
  if (!std::isfinite(report.val_loss)) return;  // then accuracies are meaningless
  for (AnsweredQuestions& set : questions_) {
    set.accuracy = set.questions.accuracy(step_->log_likelihoods(set.questions));
    report.accuracies.emplace_back(set.questions.name(), set.accuracy);
  }
}

TrainReport Trainer::run(const std::function<int()>& signal) {
  try {
    return Loop(*this, signal).run();
  } catch (const std::exception& e) {
    world_.abort(e.what());  // others learn of it now, not when saver_ has finished writing
    throw;
  }
}

std::string losses_by_name(const TrainReport& report) {
  std::string text;
  for (const auto& [name, loss] : report.val_losses) text += str(", of ", name, ' ', loss);
  return text;
}

std::string accuracies_by_name(const TrainReport& report) {
  std::string text;
  for (const auto& [name, of] : report.accuracies) text += "  " + accuracy_line(name, of);
  return text;
}

}  // namespace sheaf::models
