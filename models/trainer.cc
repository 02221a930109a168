#include "sheaf/models/trainer.h"

#include <chrono>
#include <thread>
#include <utility>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/file.h"
#include "sheaf/core/parallel.h"
#include "sheaf/distributed/agreement.h"
#include "sheaf/models/document_separator.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/product_choices.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_weights.h"

namespace sheaf::models {
namespace {

// Each host may keep its copy of the data anywhere; the contents must be the same.
void require_same_data(World& world, const Corpus& corpus, const SplitState& train, const SplitState& val,
                       const std::vector<AnsweredQuestions>& questions, const std::optional<WeightsState>& weights) {
  const std::string value = str(train.tokens, " tokens to train on, ", val.tokens, " to validate on, XXH3 ", train.xxh3,
                                " and ", val.xxh3);
  const std::string tokenizer = corpus.tokenizer ? digest_of_text(corpus.tokenizer->to_json().dump()).xxh3 : "none";
  const std::string start = weights ? str("XXH3 ", weights->xxh3) : "none";
  require_agreement(world, "data", {{"the size of the vocabulary", str(corpus.vocab)},
                                    {"the data", value, str("'", corpus.train.name(), "' (", value, ")")},
                                    {"the tokenizer", tokenizer},
                                    {"data.choices", digest_of(questions)},
                                    {"model.weights", start, weights ? str("'", weights->path, "' (", start, ")") : start}});
}

// The text conventions next to weights, if they can be read: training does not need them.
PublishedText published_text(const std::string& weights, std::string& error) {
  const std::string config = published_config_file(weights);
  if (config.empty() || !has_published_text(parent_of(config))) return {};
  try {
    return read_published_text(parent_of(config));
  } catch (const Error& e) {
    error = e.what();
    return {};
  }
}

// Published files may be gone when a run is continued: its checkpoints contain everything needed of them. The state of the newest, on ranks
// that lack `path`; collective, as others may have it.
std::optional<RunState> saved_state_without(const std::string& path, const TrainConfig& config, World& world) {
  const CheckpointGroup group = checkpoint_group(world);
  const bool is_here = path.empty() || path_exists(path);
  if (group.all_true(is_here)) return std::nullopt;
  const std::optional<Json> state = Checkpoint::newest_state(checkpoints_in(config.output.folder), group);
  return state && !is_here ? std::optional(RunState::from_json(*state)) : std::nullopt;
}

std::shared_ptr<const Tokenizer> saved_tokenizer(const TrainConfig& config, World& world, const TrainOptions& options) {
  const DataConfig& data = config.data;
  if (!options.resume || !is_published(data.tokenizer)) return nullptr;
  const std::optional<RunState> state = saved_state_without(data.tokenizer_folder, config, world);
  return state && state->tokenizer && state->tokenizer->kind() == data.tokenizer ? state->tokenizer : nullptr;
}

const TrainConfig& of_a_run_that_may_begin(const TrainConfig& config, const TrainOptions& options) {
  if (!options.resume) refuse_earlier_run(config.output);
  return config;
}

}  // namespace

void refuse_earlier_run(const OutputConfig& output) {
  for (const std::string& folder : {checkpoints_in(output.folder), checkpoints_in(output.folder + "/best")})
    if (!list_steps(folder).empty())
      fail<ConfigError>("[train] ", folder, " holds checkpoints of an earlier run: continue it with --resume, or choose "
                        "another output.folder");
}

Trainer::Trainer(const TrainConfig& config, World& world, Device device, const TrainOptions& options)
    : config_(of_a_run_that_may_begin(config, options)), world_(world), device_(device), options_(options),
      corpus_(load_corpus(config.data, config.model.vocab, saved_tokenizer(config, world, options))),
      windows_(corpus_.train, config.model.context, static_cast<uint64_t>(config.train.seed),
               window_order(config.data.order)),
      validation_(validations(corpus_.val, config.model.context, config.train.eval_tokens)), saver_(world) {
  options_.warn = one_at_a_time(options.warn);  // the saver's thread warns, too
  take_epochs();
  train_data_ = {corpus_.train.size(), corpus_.train.check_all()};
  val_data_ = {corpus_.val.size(), corpus_.val.check_all()};
  if (const OptimizationConfig& t = config_.train; t.islands > 1 && t.eval_every % std::max<int64_t>(1, t.inner_steps) != 0)
    fail<ConfigError>("[train] train.eval_every ", t.eval_every, ": islands have one model to evaluate every train.inner_steps ", t.inner_steps,
                      " steps");
  if (config_.model.vocab == 0) config_.model.vocab = corpus_.vocab;
  const int64_t least = corpus_.tokenizer ? corpus_.tokenizer->least_vocab() : corpus_.vocab;
  if (least > config_.model.vocab)
    fail<ConfigError>("[model] vocab ", config_.model.vocab, " is smaller than the tokenizer's ", least);
  if (config_.output.trace_step > 0 && config_.train.cuda_graph && device_.is_cuda())
    fail<ConfigError>("[train] output.trace_step: what runs in a graph is seen by nobody outside; measure a step without train.cuda_graph");
  config_.data.end_of_text = separator_of(config_, corpus_);
  config_.data.separate_documents = config_.data.end_of_text >= 0;
  config_.data.examples = corpus_.train.example_end().has_value();
  fitted_ = fit_recompute(config_, config_.model.vocab, world_.size(), num_threads(), std::string(world_.kind()), device_);
  check_memory(fitted_, config_.model.vocab, world_);
  find_weights();
  open_questions();
  lock_folder();
  // Ranks read data and weights at the speeds of their disks, and plan at those of their cores: who is done waits, without a deadline.
  // At this point, because it also waits for rank 0 to lock the folder.
  wait_for_all(world_);
  require_same_data(world_, corpus_, train_data_, val_data_, questions_, weights_);
  if (config_.train.recompute == "fit") {
    int64_t blocks = fitted_.train.recompute_blocks;  // plans depend on the threads of a rank
    world_.communicator().all_reduce(&blocks, 1, kI64, Reduction::max, "recompute_blocks").sync();
    fitted_.train.offload_activations = config_.train.offload_activations;  // which a plan without recomputation had dropped
    set_fitted(fitted_, blocks);
    if (world_.rank() == 0)
      options_.print(blocks == kNoRecompute ? std::string("train.recompute fit: nothing")
                                            : str("train.recompute fit: ", config_.sharding.pipeline > 1 ? str("the first ", blocks, " blocks of each stage")
                                                                                          : str(blocks, " of ", num_blocks(config_.model), " blocks"),
                                                  ", the others selectively"));
  }
  const auto num_targets = [this](int64_t first, int64_t count) { return windows_.num_targets(first, count); };
  step_ = std::make_unique<TrainingStep>(fitted_, config_.model.vocab, world_, device_, TrainingStepOptions{.num_targets = num_targets});
  restore();
  wait_for_all(world_);  // as long as the slowest of them reads
  files_.reset();
  // So that this is not discovered only at the first save.
  if (world_.rank() == 0) check_writable(checkpoints_in(config_.output.folder));
}

// From now on the number of steps is treated as given.
void Trainer::take_epochs() {
  OptimizationConfig& t = config_.train;
  if (t.epochs == 0) return;
  if (windows_.tokens().sources().size() > 1)
    fail<ConfigError>("[train] train.epochs ", t.epochs, ": sources of a mixture have epochs of their own, by their weights; give train.steps");
  const int64_t samples = windows_.samples_of(0, t.epochs);
  t.steps = (samples + t.batch - 1) / t.batch;
  const OptimizationConfig r = resolved(t);
  if ((t.decay_start > 0 || t.decay_end > 0) && r.decay_start >= r.decay_end)
    fail<ConfigError>("[train] train.epochs ", t.epochs, " are ", t.steps, " steps: the decay would start at step ", r.decay_start,
                      " and end at step ", r.decay_end);
}

// Two runs in one folder would remove each other's pending checkpoints.
void Trainer::lock_folder() {
  if (world_.rank() != 0) return;
  const std::string& folder = config_.output.folder;
  make_folders(folder);
  const auto is_elsewhere = [&] {
    lock_ = std::make_unique<FileLock>(folder + "/.lock");
    return lock_->state() == FileLock::State::elsewhere;
  };
  bool elsewhere = is_elsewhere();
  if (elsewhere && options_.resume) {  // on NFS the lock of a host that has lost power stays until its lease has run out, 90 s by default
    const auto until = std::chrono::steady_clock::now() + options_.lock_patience;
    options_.warn(str("'", folder, "' is locked, by another run or still by one whose host has failed: waiting for up to ",
                      options_.lock_patience.count(), " s"));
    for (; elsewhere && std::chrono::steady_clock::now() < until; elsewhere = is_elsewhere())
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  if (elsewhere)
    fail<ConfigError>("[train] another run is writing to '", folder, "': wait until it has ended, or choose another "
                      "output.folder");
  if (lock_->state() == FileLock::State::impossible)
    options_.warn(str("the file system of '", folder, "' has no locks: no other run must write there"));
  if (!options_.resume) refuse_earlier_run(config_.output);  // one that ended while this one read its data
  // Leftovers of a save that failed, e.g. on a full disk, where nothing else can be written.
  for (const std::string& parent : {folder, best_folder()}) {
    remove_leftovers(checkpoints_in(parent), options_.warn);
    for (const char* name : {"/config.toml", "/metrics.jsonl"}) remove_pending_files(parent + name);
  }
}

// A run that has a checkpoint no longer needs the weights: they may be gone.
void Trainer::find_weights() {
  const std::string& path = config_.model.weights;
  if (path.empty() && config_.model.lora_rank > 0)
    fail<ConfigError>("[model] lora_rank ", config_.model.lora_rank, " trains adapters of weights that stay as they are; "
                      "model.weights, where these come from, is not given");
  if (options_.resume) {
    if (const auto state = saved_state_without(path, config_, world_)) {
      weights_ = state->weights;
      return;
    }
  }
  if (path.empty()) return;
  files_ = PublishedFiles::open(path);
  check_weights(*files_, config_.model);
  files_text_ = published_text(path, files_text_error_);
  weights_ = {path, files_->digest(), files_text_.before};
}

// Texts are tokenized like those that the model was or will be trained on.
void Trainer::open_questions() {
  const PublishedText beside = std::exchange(files_text_, {});
  if (config_.data.choices.empty()) return;
  const std::shared_ptr<const Tokenizer> tokenizer = corpus_.tokenizer ? corpus_.tokenizer : beside.tokenizer;
  if (!tokenizer)
    fail<ConfigError>("[data] data.choices '", config_.data.choices, "' are texts, and token files do not say how to encode them",
                      !files_text_error_.empty() ? str(", nor can the tokenizer in '", weights_->path, "' be read (", files_text_error_, ")")
                      : weights_                 ? str(", nor is there a tokenizer in '", weights_->path, "'")
                                                 : "",
                      ": give data.tokenizer gpt2, llama3, huggingface or byte");
  ChoiceQuestions::Options options{.context = config_.model.context, .vocab = config_.model.vocab, .most = config_.train.eval_questions};
  if (weights_) options.before = weights_->before;
  questions_ = models::open_questions(config_.data.choices, *tokenizer, options);
}

void Trainer::load_initial_weights() {
  if (!files_) return;
  load_weights(step_->model(), *files_);
  if (step_->outer()) step_->outer()->begin();
  if (world_.rank() == 0) options_.print(str("starts from the weights in ", files_->path()));
}

void Trainer::restore() {
  const std::string folder = checkpoints_in(config_.output.folder);
  if (!options_.resume) return load_initial_weights();
  auto checkpoint = Checkpoint::open_newest(folder, options_.warn, checkpoint_group(step_->model(), world_, step_->outer()));
  if (!checkpoint) {
    if (world_.rank() == 0) options_.print(str("no checkpoint in ", folder, ": the run starts from the beginning"));
    load_initial_weights();
    return take_best();
  }
  const RunState state = RunState::from_json(checkpoint->state());
  check_resumable(state, this->state(0));
  load_state(*checkpoint, step_->model(), {&step_->optimizer()}, {.scaler = step_->scaler(), .outer = step_->outer()});
  first_step_ = state.step;
  abandoned_ = checkpoint->broken();
  best_ = state.best;
  const std::optional<WeightsState> found = std::exchange(weights_, state.weights);
  if (weights_ && weights_->before.empty() && found) weights_->before = found->before;  // which older checkpoints lack
  take_best();
  if (world_.rank() == 0) options_.print(str("resumed from ", checkpoint->path()));
  take_choices(state, checkpoint->path());
}

// The best weights may be of a later step than the newest checkpoint, if there is one: they stay until a lower loss replaces them. If
// they are gone or damaged, any loss is lower.
void Trainer::take_best() {
  if (!config_.output.keep_best) return;
  std::optional<Checkpoint> there;
  try {
    there = Checkpoint::open_newest(checkpoints_in(best_folder()), options_.warn, checkpoint_group(world_));
  } catch (const CheckpointError&) {  // broken, as open_newest() has said
  }
  if (there) {
    const RunState later = RunState::from_json(there->state());
    if (later.best && later.step > first_step_) {
      try {
        check_resumable(later, state(0));
      } catch (const Error& error) {
        throw Error(ExitCode::kResumeMismatch, str(error.what(), " (of the best weights so far, in ", best_folder(), ")"));
      }
      best_ = later.best;
    }
  }
  if (best_ && (!there || there->step() != best_->step)) {
    if (world_.rank() == 0)
      options_.warn(str("the best weights so far, of step ", best_->step, ", are not in '", best_folder(), "': the next evaluation's are the best"));
    best_.reset();
  }
  if (best_ && best_->targets != 0 && best_->targets != num_val_targets())
    throw Error(ExitCode::kResumeMismatch,
                str("[resume] the best weights so far have a loss over ", best_->targets, " targets, and train.eval_tokens ",
                    config_.train.eval_tokens, " makes ", num_val_targets(), " of them, whose losses cannot be compared: give ",
                    "train.eval_tokens as before, output.keep_best false, or another output folder"));
}

// Before the first step, which does not time known choices again.
void Trainer::take_choices(const RunState& state, const std::string& checkpoint) {
  if (state.product_choices.empty() || !device_.is_cuda()) return;
  try {
    if (take_product_choices(device_, state.product_choices) == 0 && world_.rank() == 0)
      options_.print("its choices of algorithms for products are of another GPU or cuBLASLt: they are made again");
  } catch (const DataError& error) {
    fail<DataError>("[resume] ", checkpoint, "/manifest.json: ", error.what());
  }
}

int64_t Trainer::num_parameters() { return step_->num_parameters(); }

RunState Trainer::state(int64_t step) const {
  RunState state;
  state.step = step;
  state.vocab = config_.model.vocab;
  state.model = model_of(config_);
  state.train = config_.train;
  state.order = config_.data.order;
  state.tokenizer = corpus_.tokenizer;
  if (config_.data.train_file.empty()) state.val_fraction = config_.data.val_fraction;
  state.train_data = train_data_;
  state.weights = weights_;
  state.val_data = val_data_;
  state.best = best_;
  return state;
}

void Trainer::save(int64_t step) {
  RunState state = this->state(step);
  state.product_choices = product_choices(device_);
  const std::string folder = checkpoints_in(config_.output.folder);
  const SaveOptions options{.state = state.to_json(), .keep = config_.output.keep_checkpoints, .abandoned = abandoned_,
                            .scaler = step_->scaler(), .outer = step_->outer(), .warn = options_.warn};
  std::erase(abandoned_, step);
  if (config_.train.save_async) saver_.save(folder, step, step_->model(), {&step_->optimizer()}, options);
  else save_checkpoint(folder, step, step_->model(), {&step_->optimizer()}, world_, options);
}

int64_t Trainer::num_val_targets() const {
  int64_t targets = 0;
  for (const Validation& v : validation_) targets += v.windows.num_targets();
  return targets;
}

// Saves only the weights of the lowest loss so far, in the form of a run's folder, and removes whatever steps are there: a run that was
// resumed on other ranks may find a lower loss after fewer steps.
void Trainer::save_if_best(int64_t step, double val_loss) {
  if (!config_.output.keep_best || (best_ && val_loss >= best_->val_loss)) return;
  best_ = {step, val_loss, num_val_targets()};
  const std::string best = best_folder(), folder = checkpoints_in(best), options = config_.output.folder + "/config.toml";
  if (world_.rank() == 0 && path_exists(options)) {
    make_folders(best);
    replace_file(best + "/config.toml", File::open(options).read_all());
  }
  SaveOptions save{.state = state(step).to_json(), .keep = 1, .outer = step_->outer(), .warn = options_.warn};
  if (world_.rank() == 0) save.abandoned = list_steps(folder);
  save_checkpoint(folder, step, step_->model(), {}, world_, save);
}

}  // namespace sheaf::models
