#include "sheaf/models/training_step.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/passes/fuse_elementwise.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/distributed/keep_within.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/models/parameter_factors.h"
#include "sheaf/models/product_choices.h"
#include "sheaf/models/stage_cut.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/schedule.h"
#include "sheaf/nn/parameter_norms.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

// step() gets the learning rate each time, so none is set here.
std::unique_ptr<optim::Optimizer> make_optimizer(const OptimizationConfig& t, nn::Module& module) {
  optim::AdamWOptions adamw;
  adamw.beta1 = t.beta1;
  adamw.beta2 = t.beta2;
  adamw.eps = t.eps;
  adamw.weight_decay = t.weight_decay;
  adamw.factors.lr = factors_by_name("train.lr_factors", t.lr_factors, module, {});
  adamw.factors.weight_decay = factors_by_name("train.weight_decay_factors", t.weight_decay_factors, module, optim::decays_matrices);
  adamw.state.offload = t.offload_optimizer;
  if (t.state_dtype == "bf16") adamw.state.dtype = kBF16;
  else check<ConfigError>(t.state_dtype == "f32", "[train] train.state_dtype is ", t.state_dtype, ", not f32 or bf16");
  if (t.optimizer == "adamw") return std::make_unique<optim::AdamW>(module, adamw);
  check<ConfigError>(t.optimizer == "muon", "[train] train.optimizer is ", t.optimizer, ", not adamw or muon");
  optim::MuonOptions muon{.lr = adamw.lr, .momentum = t.momentum, .weight_decay = t.weight_decay, .factors = adamw.factors,
                          .state = adamw.state, .adamw = adamw};
  if (t.dtype == "bf16") muon.compute_dtype = kBF16;
  return std::make_unique<optim::Muon>(module, muon);
}

optim::DiLoCoOptions outer_options(const OptimizationConfig& t) {
  check<ConfigError>(t.inner_steps > 0, "[train] train.inner_steps ", t.inner_steps, ": there is at least one");
  return {.lr = t.outer_lr, .momentum = t.outer_momentum, .moves = optim::moves_from(t.outer_dtype), .offload = t.offload_optimizer};
}

// Which blocks are recomputed in the backward: the first ones of each stage, because the memory of later blocks is free when the
// reverse pass reaches them.
void recompute_blocks(const TrainConfig& config, ShardedModel& sharded, int stages) {
  const bool selective = config.train.recompute == "selective";
  if (!selective && config.train.recompute != "block") {
    check<ConfigError>(config.train.recompute == "none", "[train] train.recompute is ", config.train.recompute,
                       ", not none, selective or block (fit is one of them once it is planned)");
    check<ConfigError>(!config.train.offload_activations, "[train] train.offload_activations goes with train.recompute block, "
                       "selective or fit: offloaded is what blocks are computed again from");
    return;
  }
  const int64_t blocks = config.train.recompute_blocks;
  std::vector<int64_t> left(static_cast<size_t>(stages), blocks >= 0 ? blocks : selective ? 0 : num_blocks(config.model));
  for (auto& [path, module] : sharded.model->named_modules()) {
    if (!sharded.model->is_block(*module)) continue;
    const bool whole = left[static_cast<size_t>(std::max(0, sharded.model->stage_of(*module, sharded.cut)))]-- > 0;
    if (whole) module->recompute({.offload = config.train.offload_activations});
    else if (selective) module->recompute({.selective = true});
  }
}

constexpr double kNoClipping = std::numeric_limits<double>::infinity();

// Steps that run as usual before one is compiled or captured.
constexpr int64_t kSettling = 2;

void check_update_in_backward(const OptimizationConfig& t) {
  check<ConfigError>(t.clip == 0, "[train] train.update_in_backward with train.clip ", t.clip, ": no gradient can be clipped before all are known; ",
                     "train.clip 0 clips none");
  check<ConfigError>(t.dtype != "f16", "[train] train.update_in_backward with train.dtype f16: whether a step is skipped is known after the ",
                     "backward; bf16 skips none");
  check<ConfigError>(t.log_norms == "none", "[train] train.update_in_backward with train.log_norms ", t.log_norms, ": the gradients of single ",
                     "parameters are gone at the end of the step");
}

void check_graph(Device device, const Mesh& mesh) {
  if (device.is_cpu()) fail<ConfigError>("[train] train.cuda_graph: this run computes on CPUs, which have no graphs");
  if (device.is_meta()) return;
  for (int axis = 0; axis < mesh.spec->num_axes(); ++axis)
    for (const Communicator* lane : {&mesh.runtime->gather_lane(axis), &mesh.runtime->reduce_lane(axis)})
      if (mesh.spec->size(axis) > 1 && !lane->can_be_captured())
        fail<ConfigError>("[train] train.cuda_graph: ranks talk over '", lane->kind(), "', which a graph cannot hold; "
                        "with a GPU for each rank they talk over NCCL");
}

}  // namespace

TrainingStep::TrainingStep(const TrainConfig& config, int64_t vocab, World& world, Device device, const TrainingStepOptions& options)
    : config_(island_of(config)), world_(world), device_(device), overlap_(options.overlap), num_targets_(options.num_targets),
      sharded_(sharded_model(config, vocab, world, {.blocks = options.stand_in.blocks})), turns_(options.stand_in.turns) {
  check<ConfigError>(!config_.data.examples || num_targets_ || device_.is_meta(), "[train] data.examples: how many targets count is not known");
  world_.communicator();  // joined in a plan, too, as in a run: its memory counts
  if (config_.train.cuda_graph) check_graph(device_, sharded_.mesh);
  if (config_.sharding.memory_budget != 0 && !config_.train.compile)
    fail<ConfigError>("[train] sharding.memory_budget ", config_.sharding.memory_budget, " is for train.recompute fit and for "
                      "train.compile");
  if (config_.train.update_in_backward) check_update_in_backward(config_.train);
  const int stages = sharded_.mesh.spec->has_axis("stage") ? sharded_.mesh.size("stage") : 1;
  const int64_t runs = config_.sharding.pipeline_runs;
  if (runs > 1 && turns_.empty() && config_.train.micro_batches % stages != 0)
    fail<ConfigError>("[train] train.micro_batches ", config_.train.micro_batches, ": with sharding.pipeline_runs ", runs, " it is a multiple of ",
                      "sharding.pipeline, ", stages);
  if (turns_.empty())
    turns_ = turns_of(config_, stages > 1 ? sharded_.mesh.coordinate("stage") : 0, stages, config_.train.micro_batches);
  const DeviceScope scope(device_);
  const optim::FactorRule rate_of = factors_by_name("train.lr_factors", config_.train.lr_factors, *sharded_.model, {});
  for (nn::Parameter& p : sharded_.model->parameters())
    if (p.steered() != 0 && rate_of(p) == 0) p.freeze();  // no learning rate moves it: neither would a factor of 0 keep it as it is
  materialize(*sharded_.model, device_, {.seed = static_cast<uint64_t>(config_.train.seed), .dtype = options.masters});
  recompute_blocks(config_, sharded_, stages);
  optimizer_ = make_optimizer(config_.train, *sharded_.model);
  if (config_.train.dtype == "f16")
    scaler_.emplace(device_, optim::LossScalerOptions{.initial = config_.train.loss_scale,
                                                      .growth_interval = config_.train.loss_scale_interval});
  if (config.train.islands > 1) {
    check<ConfigError>(!scaler_, "[train] train.islands ", config.train.islands, ": with train.dtype f16 each would skip steps of its own");
    outer_.emplace(*sharded_.model, sharded_.islands, "island", outer_options(config.train));
  }
  inputs_ = std::make_unique<StepInputs>(config_, sharded_.mesh, device_,
                                         static_cast<int64_t>(optimizer_->next_scalars().size()));
}

int64_t TrainingStep::first_sample(int64_t step) const {
  return (step * sharded_.num_islands() + sharded_.island()) * config_.train.batch;
}

int64_t TrainingStep::num_parameters() {
  int64_t count = 0;
  for (const nn::Parameter& p : sharded_.model->parameters()) count += p.shape().numel();
  return count;
}

int64_t TrainingStep::num_trained() {
  int64_t count = 0;
  for (const nn::Parameter& p : sharded_.model->parameters()) count += p.trainable() ? p.numel() : 0;
  return count;
}

std::vector<nn::Parameter> TrainingStep::trained() {
  std::vector<nn::Parameter> out;
  for (const nn::Parameter& p : sharded_.model->parameters())
    if (p.trainable() && p.steered() == 0) out.push_back(p);
  return out;
}

double TrainingStep::learning_rate(int64_t step) const {
  const OptimizationConfig t = resolved(config_.train);
  const optim::ScheduleOptions options{.peak = t.lr, .minimum = t.min_lr, .warmup = t.warmup,
                                       .decay_start = t.decay_start, .total = t.decay_end};
  if (t.schedule == "linear") return optim::linear(step, options);
  if (t.schedule == "constant") return optim::constant(step, options);
  return optim::cosine(step, options);
}

bool TrainingStep::runs_as_graph(const RecordedStep* recorded) const {
  const bool copies_leaves = recorded && recorded->capture_leaves;
  const bool settled = runs_ >= kSettling && (!config_.train.compile || program_);
  return config_.train.cuda_graph && device_.is_cuda() && settled && !copies_leaves;
}

TrainingStep::Result TrainingStep::run(int64_t step, const FillBatch& fill, RecordedStep* recorded) {
  const DeviceScope scope(device_);
  const double lr = learning_rate(step);
  sharded_.model->train();
  const int64_t first = first_sample(step);
  const int64_t targets = num_targets_ ? num_targets_(first, config_.train.batch) : tokens_of_island();
  inputs_->set_step(step, first, fill, optimizer_->next_scalars({.lr = lr}), static_cast<double>(targets));
  const bool compiles = config_.train.compile && runs_ == kSettling;
  const Result result = runs_as_graph(recorded) ? replay(step, lr, recorded)
                        : program_              ? run_program(lr, recorded)
                        : compiles              ? compile(step, lr, recorded)
                        : runs_ == 0            ? record_first(step, lr, recorded)
                                                : record(step, lr, recorded);
  ++runs_;
  if (outer_ && ((step + 1) % config_.train.inner_steps == 0 || step + 1 == config_.train.steps)) outer_step();
  return result;
}

void TrainingStep::outer_step() {
  std::optional<CollectivesInTurn> in_turn;  // as in the first step: a GPU loads kernels when they first run, which may wait for all other
                                             // work
  if (std::exchange(first_outer_step_, false)) in_turn.emplace();
  release_program();
  outer_->step();
}

void TrainingStep::mean_over_islands(std::span<double> values) const {
  sharded_.sum_over_islands(values);
  for (double& value : values) value /= sharded_.num_islands();
}

TrainingStep::Result TrainingStep::record(int64_t step, double lr, RecordedStep* recorded) {
  Result result;
  result.lr = lr;
  {
    Recording recording({.step = step, .first_sample = first_sample(step), .seed = static_cast<uint64_t>(config_.train.seed),
                         .capture_leaves = recorded && recorded->capture_leaves, .overlap = overlap_, .piece_rows = config_.sharding.piece_rows});
    run_turns(recording, result, recorded);
    update(result);
    {
      const PhaseScope phase(Phase::update);
      const Layout everywhere(sharded_.mesh.spec, Placement::invariant());
      result.loss = redistribute(result.loss, everywhere);
      if (result.mtp) result.mtp = redistribute(result.mtp, everywhere);
    }
    if (recorded) keep(recording, result, *recorded);
  }
  optimizer_->zero_grad();
  return result;
}

// Forwards and backwards of the step's micro-batches, in the order of a pipeline's schedule; their losses are summed.
void TrainingStep::run_turns(Recording& recording, Result& result, RecordedStep* recorded) {
  const OptimizationConfig& t = config_.train;
  CrossEntropyOptions mean{.divide_by = static_cast<double>(tokens_of_island()), .z_loss = t.z_loss};
  if (config_.data.examples) mean.divisor = inputs_->num_targets();
  // Collectives that end before their call returns do not allow several micro-batches in flight.
  const bool in_turn = CollectivesInTurn::active() && device_.is_cuda();
  const int64_t runs = in_turn ? 1 : config_.sharding.pipeline_runs, first = recording.options().first_sample;
  std::vector<Tensor> losses(static_cast<size_t>(t.micro_batches)), scaled = losses;
  std::vector<ForwardProgress> forwards(losses.size());
  const auto add_up = [](Tensor& sum, Tensor&& of) {
    if (const Tensor addend = std::exchange(of, {})) sum = sum ? add(sum, addend) : addend;
  };
  const auto forward = [&](int64_t micro, int64_t run) {
    const auto m = static_cast<size_t>(micro);
    const StepInputs::MicroBatch& batch = inputs_->micro_batch(micro);
    const int64_t sample = first + t.batch * micro / t.micro_batches;
    run == 0 ? recording.next_micro_batch(sample, batch.random_state) : recording.resume_micro_batch(sample, batch.random_state);
    losses[m] = sharded_.model->loss_until(sharded_.end_of_run(run, runs), forwards[m], batch.tokens, batch.targets, mean);
    if (run + 1 == runs) scaled[m] = scaler_ ? scaler_->scale(losses[m]) : losses[m];
  };
  const auto backward = [&](int64_t micro, int64_t run, bool defer_weights) {
    const auto m = static_cast<size_t>(micro);
    const Tensor of = run == 0 ? std::exchange(scaled[m], {}) : scaled[m];
    recording.backward(of, {.last_micro_batch = micro + 1 == t.micro_batches, .last_part_only = runs > 1, .defer_weights = defer_weights});
    if (run > 0) return;
    add_up(result.loss, std::move(losses[m]));
    add_up(result.mtp, std::move(forwards[m].mtp));
  };
  const auto note_turn = [&] {
    if (recorded) recorded->turns.push_back(recording.tape().num_nodes());
  };
  if (recorded) recorded->turns.clear();
  if (t.update_in_backward) optimizer_->step_in_backward({.lr = result.lr, .scalars = inputs_->scalars()});
  for (const auto [kind, micro, run] : in_turn ? one_forward_one_backward(0, 1, t.micro_batches) : turns_) {
    note_turn();
    if (kind == Turn::forward) forward(micro, run);
    else if (kind == Turn::backward_weight) recording.backward_weights();
    else backward(micro, run, /*defer_weights=*/kind == Turn::backward_input);
  }
  note_turn();
}

void TrainingStep::update(Result& result) {
  const OptimizationConfig& t = config_.train;
  if (scaler_) result.grad_norm = clip_grad_norm(*sharded_.model, t.clip > 0 ? t.clip : kNoClipping, *scaler_);
  else if (t.clip > 0) result.grad_norm = clip_grad_norm(*sharded_.model, t.clip);
  else result.grad_norm = grad_norm(*sharded_.model);
  if (t.log_norms != "none") result.grad_norms = scaler_ ? grad_norms(trained(), *scaler_) : grad_norms(trained());
  if (t.update_in_backward) optimizer_->step();
  else optimizer_->step({.lr = result.lr, .scalars = inputs_->scalars()});
  if (scaler_) scaler_->update();
}

void TrainingStep::keep(Recording& recording, const Result& result, RecordedStep& recorded) {
  recorded.loss = recording.value_of(result.loss);
  recorded.grad_norm = recording.value_of(result.grad_norm);
  if (result.mtp) recorded.mtp = recording.value_of(result.mtp);
  if (result.grad_norms) recorded.grad_norms = recording.value_of(result.grad_norms);
  recorded.leaves = recording.captured();
  recorded.memory = recording.leaves();
  recorded.reruns = recording.reruns();
  recorded.tape = recording.take();
}

TrainingStep::Result TrainingStep::record_first(int64_t step, double lr, RecordedStep* recorded) {
  const CollectivesInTurn in_turn;
  std::optional<kernels::cuda::TuneProducts> tune;
  if (config_.train.tune_products && device_.is_cuda()) tune.emplace();
  const Result result = record(step, lr, recorded);
  if (device_.is_cuda() && world_.size() > 1)
    share_product_choices(world_.communicator(), product_choices(device_),
                          [this](std::string_view choices) { take_product_choices(device_, choices); });
  return result;
}

TrainingStep::Result TrainingStep::compile(int64_t step, double lr, RecordedStep* recorded) {
  compiled_.capture_leaves = recorded && recorded->capture_leaves;
  const Result result = record(step, lr, &compiled_);
  if (recorded) *recorded = compiled_;
  std::vector<ValueId> wanted{compiled_.loss, compiled_.grad_norm};
  for (const ValueId v : {compiled_.mtp, compiled_.grad_norms})
    if (v >= 0) wanted.push_back(v);
  program_ = std::make_unique<Program>(std::exchange(compiled_.tape, {}), [this](ValueId v) { return compiled_.memory.at(v); },
                                       wanted);
  if (config_.train.fuse) *program_ = fuse_elementwise(std::move(*program_));
  if (const int64_t budget = config_.sharding.memory_budget; budget > 0)
    program_ = std::make_unique<Program>(keep_within(budget, world_, device_)(*program_));
  compiled_.memory.clear();
  compiled_.leaves.clear();
  return result;
}

TrainingStep::Result TrainingStep::run_program(double lr, RecordedStep* recorded) {
  for (const auto& effect : compiled_.reruns.before) effect();
  if (recorded) {
    recorded->tape = program_->tape();
    recorded->loss = compiled_.loss, recorded->grad_norm = compiled_.grad_norm, recorded->mtp = compiled_.mtp;
    recorded->grad_norms = compiled_.grad_norms;
    for (const ValueId v : program_->tape().leaves()) {
      recorded->memory[v] = program_->leaf(v);
      if (recorded->capture_leaves) recorded->leaves[v] = program_->leaf(v).clone();
    }
  }
  const std::vector<Tensor> values = program_->run();
  for (const auto& effect : compiled_.reruns.after) effect();
  Result result{values[0], values[1], lr};
  size_t next = 2;  // as they are wanted
  if (compiled_.mtp >= 0) result.mtp = values[next++];
  if (compiled_.grad_norms >= 0) result.grad_norms = values[next++];
  return result;
}

TrainingStep::Result TrainingStep::replay(int64_t step, double lr, RecordedStep* recorded) {
  if (!graph_) {
    if (program_) program_->reserve();
    GpuCapture capture(RankContext::current().gpu_of(device_));
    captured_ = program_ ? run_program(lr, &captured_step_) : record(step, lr, &captured_step_);
    captured_step_.memory.clear();
    graph_ = capture.finish();
  } else {
    const Reruns& reruns = (program_ ? compiled_ : captured_step_).reruns;
    for (const auto* effects : {&reruns.before, &reruns.after})
      for (const auto& effect : *effects) effect();
  }
  graph_->replay();
  if (recorded) *recorded = captured_step_;
  captured_.lr = lr;
  return captured_;
}

void TrainingStep::release_program() {
  if (program_ && !graph_) program_->release();  // a graph keeps using its memory
}

void TrainingStep::prepare_evaluation() {
  release_program();
  sharded_.model->eval();
}

double TrainingStep::evaluate(const SequentialWindows& windows) {
  const DeviceScope scope(device_);
  prepare_evaluation();
  return loss_over(windows, sharded_, *inputs_, first_evaluation_);
}

std::vector<double> TrainingStep::log_likelihoods(const ChoiceQuestions& questions) {
  const DeviceScope scope(device_);
  prepare_evaluation();
  return models::log_likelihoods(questions, sharded_, config_, device_, first_questions_);
}

}  // namespace sheaf::models
