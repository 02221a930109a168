#include "sheaf/models/training_step.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/distributed/keep_within.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/product_choices.h"
#include "sheaf/models/stage_cut.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/schedule.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

/// Whether what is not cut by experts is sharded over their axis.
bool is_over_experts(int data, int experts, int context) { return data == 1 && experts > 1 && experts >= context; }

ShardOptions shard_options(const TrainConfig& config, const Mesh& mesh, Decoder& model, const StageCut& cut) {
  const auto axis_if_any = [&](const char* name) { return mesh.spec->has_axis(name) ? name : ""; };
  if (config.sharding.experts > 1 && config.model.experts == 0)
    fail<ConfigError>("[train] sharding.experts ", config.sharding.experts, ": the model has no mixtures of experts (model.experts)");
  ShardOptions options;
  const auto ranks = [&](const char* name) { return mesh.spec->has_axis(name) ? mesh.spec->size(mesh.spec->axis(name)) : 1; };
  options.axis = mesh.spec->has_axis("data") ? "data" : "context";
  if (is_over_experts(ranks("data"), ranks("expert"), ranks("context"))) options.axis = "expert";
  options.replica_axis = axis_if_any("replica");
  options.secondary = config.sharding.secondary;
  options.expert_axis = axis_if_any("expert");
  options.context_axis = axis_if_any("context");
  options.context_comm = nn::context_comm_from(config.sharding.context_comm);
  options.tensor_axis = axis_if_any("model");
  options.stage_axis = axis_if_any("stage");
  options.strategy = config.sharding.strategy;
  options.prefetch_bytes = config.sharding.prefetch_bytes;
  options.compute_dtype = compute_dtype_from("train", config.train.dtype);
  if (config.sharding.reduce_dtype == "bf16") options.reduce_dtype = kBF16;
  else check<ConfigError>(config.sharding.reduce_dtype == "f32", "[train] sharding.reduce_dtype is ", config.sharding.reduce_dtype,
                          ", not f32 or bf16");
  if (const int stages = ranks("stage"); stages > 1) {
    if (config.sharding.units != "block")
      fail<ConfigError>("[train] sharding.units ", config.sharding.units, ": the stages of sharding.pipeline ", stages, " are of blocks");
    options.stage_of = [&](const nn::Module& m, const std::string&) { return model.stage_of(m, cut); };
    options.units = nn::units_where([&](nn::Module& m, const std::string&) { return model.stage_of(m, cut) >= 0; });
    return options;
  }
  if (config.sharding.units == "block")
    options.units = nn::units_where([&model](nn::Module& m, const std::string&) { return model.is_block(m); });
  else if (config.sharding.units == "count")
    options.units = nn::units_of_at_least(config.sharding.min_parameters);
  return options;
}

// Ranks that share a layer are neighbours, then those that share a sequence, then those that share experts, then those that
// share the model, then its stages: what moves most, and with nothing to hide behind, moves between GPUs of one host. The parameters are cut over
// "data" or, where those are more ranks, over "context", or over "expert" where there is no other rank for "data"; along the
// others the model is replicated.
Mesh mesh_for(const ShardingConfig& sharding, World& world) {
  const int ranks = world.size();
  if (sharding.replicas > 1 && sharding.strategy == "replicate")
    fail<ConfigError>("[train] sharding.replicas ", sharding.replicas, ": strategy replicate has one on each rank already");
  int rest = ranks;  // for "data"
  const auto divide = [&](const char* key, int64_t by, const char* into) {
    if (by < 1 || rest % by != 0)
      fail<ConfigError>("[train] ", key, " ", by, ": ", rest, rest == 1 ? " rank cannot" : " ranks cannot", " be divided into ",
                        into, rest == ranks ? "" : str("; all ", ranks, " are for sharding.replicas times sharding.context times "
                                               "sharding.tensor times sharding.experts times sharding.pipeline"));
    rest /= static_cast<int>(by);
    return static_cast<int>(by);
  };
  int replicas = divide("sharding.replicas", sharding.replicas, "as many equal groups");
  const int tensor = divide("sharding.tensor", sharding.tensor, "groups of so many");
  const int context = divide("sharding.context", sharding.context, "groups of so many");
  const int stages = divide("sharding.pipeline", sharding.pipeline, "groups of so many");
  const int experts = divide("sharding.experts", sharding.experts, "groups of so many");
  const bool goes_round = sharding.pipeline_runs != 1;
  if (goes_round && (sharding.pipeline_runs < 1 || stages == 1))
    fail<ConfigError>("[train] sharding.pipeline_runs ", sharding.pipeline_runs, ": runs of blocks are those of several stages "
                      "(sharding.pipeline), which is ", stages);
  if (sharding.pipeline_schedule != "1f1b" && stages == 1)
    fail<ConfigError>("[train] sharding.pipeline_schedule ", sharding.pipeline_schedule, ": it is about the turns of several stages "
                      "(sharding.pipeline), which is ", stages);
  const bool over_experts = is_over_experts(rest, experts, context), over_context = context > rest;
  if (over_context) replicas *= rest;
  if (sharding.secondary && replicas == 1 && (context == 1 || (over_context && !over_experts)) && (experts == 1 || over_experts))
    fail<ConfigError>("[train] sharding.secondary needs several groups of ranks: sharding.replicas, or sharding.experts or a "
                      "sharding.context that is not what the parameters are cut over");
  std::vector<MeshSpec::Axis> axes;
  if (stages != 1) axes.push_back({"stage", stages, /*chain=*/true, /*ring=*/goes_round});
  if (replicas != 1) axes.push_back({"replica", replicas});
  if (!over_context) axes.push_back({"data", rest});
  if (experts != 1) axes.push_back({"expert", experts});
  if (context != 1) axes.push_back({"context", context});
  if (tensor != 1) axes.push_back({"model", tensor});
  if (axes.size() > kMaxAxes)
    fail<ConfigError>("[train] a mesh has at most ", kMaxAxes, " axes: stages, replicas, data, experts, context and tensor are ", axes.size());
  return world.mesh(axes);
}

// Whose steps are told the learning rate.
std::unique_ptr<optim::Optimizer> make_optimizer(const OptimizationConfig& t, nn::Module& module) {
  optim::AdamWOptions adamw;
  adamw.beta1 = t.beta1;
  adamw.beta2 = t.beta2;
  adamw.eps = t.eps;
  adamw.weight_decay = t.weight_decay;
  adamw.state.offload = t.offload_optimizer;
  if (t.state_dtype == "bf16") adamw.state.dtype = kBF16;
  else check<ConfigError>(t.state_dtype == "f32", "[train] train.state_dtype is ", t.state_dtype, ", not f32 or bf16");
  if (t.optimizer == "adamw") return std::make_unique<optim::AdamW>(module, adamw);
  check<ConfigError>(t.optimizer == "muon", "[train] train.optimizer is ", t.optimizer, ", not adamw or muon");
  optim::MuonOptions muon{.lr = adamw.lr, .momentum = t.momentum, .weight_decay = t.weight_decay, .state = adamw.state, .adamw = adamw};
  if (t.dtype == "bf16") muon.compute_dtype = kBF16;
  return std::make_unique<optim::Muon>(module, muon);
}

constexpr double kNoClipping = std::numeric_limits<double>::infinity();

// Steps that run as usual before one is compiled or captured.
constexpr int64_t kSettling = 2;

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
    : config_(config), world_(world), device_(device), num_targets_(options.num_targets), mesh_(mesh_for(config.sharding, world)),
      cut_(options.stand_in.blocks.empty() ? stage_cut(config, vocab) : StageCut(options.stand_in.blocks, static_cast<int>(config.sharding.pipeline))),
      turns_(options.stand_in.turns),
      model_(make_language_model(model_of(config), vocab)) {
  check<ConfigError>(!config_.data.examples || num_targets_ || device_.is_meta(), "[train] data.examples: how many targets count is not known");
  world_.communicator();  // joined here by a plan as by a run: what it holds counts
  if (config_.train.cuda_graph) check_graph(device_, mesh_);
  if (config_.sharding.memory_budget != 0 && !config_.train.compile)
    fail<ConfigError>("[train] sharding.memory_budget ", config_.sharding.memory_budget, " is for train.recompute fit and for "
                      "train.compile");
  const int stages = mesh_.spec->has_axis("stage") ? mesh_.size("stage") : 1;
  const int64_t runs = config_.sharding.pipeline_runs;
  if (runs > 1 && turns_.empty() && config_.train.micro_batches % stages != 0)
    fail<ConfigError>("[train] train.micro_batches ", config_.train.micro_batches, ": with sharding.pipeline_runs ", runs, " it is a multiple of ",
                      "sharding.pipeline, ", stages);
  if (turns_.empty())
    turns_ = turns_of(config_, stages > 1 ? mesh_.coordinate("stage") : 0, stages, config_.train.micro_batches);
  const DeviceScope scope(device_);
  shard(*model_, mesh_, shard_options(config_, mesh_, *model_, cut_));
  materialize(*model_, device_, {.seed = static_cast<uint64_t>(config_.train.seed), .dtype = options.masters});
  if (const bool selective = config_.train.recompute == "selective"; selective || config_.train.recompute == "block") {
    // The first ones, of each stage: when the reverse pass comes to them, what later ones had kept is gone.
    const int64_t blocks = config_.train.recompute_blocks;
    std::vector<int64_t> left(static_cast<size_t>(stages), blocks >= 0 ? blocks : selective ? 0 : config_.model.layers);
    for (auto& [path, module] : model_->named_modules()) {
      if (!model_->is_block(*module)) continue;
      const bool whole = left[static_cast<size_t>(std::max(0, model_->stage_of(*module, cut_)))]-- > 0;
      if (whole) module->recompute({.offload = config_.train.offload_activations});
      else if (selective) module->recompute({.selective = true});
    }
  } else {
    check<ConfigError>(config_.train.recompute == "none", "[train] train.recompute is ", config_.train.recompute,
                       ", not none, selective or block (fit is one of them once it is planned)");
    check<ConfigError>(!config_.train.offload_activations, "[train] train.offload_activations goes with train.recompute block, "
                       "selective or fit: offloaded is what blocks are computed again from");
  }
  optimizer_ = make_optimizer(config_.train, *model_);
  if (config_.train.dtype == "f16")
    scaler_.emplace(device_, optim::LossScalerOptions{.initial = config_.train.loss_scale,
                                                      .growth_interval = config_.train.loss_scale_interval});
  inputs_ = std::make_unique<StepInputs>(config_, mesh_, device_,
                                         static_cast<int64_t>(optimizer_->next_scalars().size()));
}

int64_t TrainingStep::num_parameters() {
  int64_t count = 0;
  for (const nn::Parameter& p : model_->parameters()) count += p.shape().numel();
  return count;
}

int64_t TrainingStep::num_trained() {
  int64_t count = 0;
  for (const nn::Parameter& p : model_->parameters()) count += p.trainable() ? p.numel() : 0;
  return count;
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
  model_->train();
  const int64_t first = step * config_.train.batch;
  const int64_t targets = num_targets_ ? num_targets_(first, config_.train.batch) : tokens_per_step();
  inputs_->set_step(step, first, fill, optimizer_->next_scalars({.lr = lr}), static_cast<double>(targets));
  const bool compiles = config_.train.compile && runs_ == kSettling;
  const Result result = runs_as_graph(recorded) ? replay(step, lr, recorded)
                        : program_              ? run_program(lr, recorded)
                        : compiles              ? compile(step, lr, recorded)
                        : runs_ == 0            ? record_first(step, lr, recorded)
                                                : record(step, lr, recorded);
  ++runs_;
  return result;
}

int64_t TrainingStep::end_of_run(int64_t run, int64_t runs) const {
  return run + 1 == runs ? config_.model.layers : cut_.end_of_run(run, mesh_.coordinate("stage"));
}

TrainingStep::Result TrainingStep::record(int64_t step, double lr, RecordedStep* recorded) {
  const OptimizationConfig& t = config_.train;
  CrossEntropyOptions mean{.divide_by = static_cast<double>(tokens_per_step())};
  if (config_.data.examples) mean.divisor = inputs_->num_targets();
  Tensor loss;  // of the micro-batches so far, in order
  std::vector<Tensor> parts(static_cast<size_t>(t.micro_batches)), scaled = parts;
  std::vector<ForwardProgress> forwards(parts.size());
  Result result;
  result.lr = lr;
  {
    const int64_t first = step * t.batch;
    Recording recording({.step = step, .first_sample = first, .seed = static_cast<uint64_t>(t.seed),
                         .capture_leaves = recorded && recorded->capture_leaves});
    // Collectives that are through before their call returns leave no room for several micro-batches under way.
    const bool in_turn = CollectivesInTurn::active() && device_.is_cuda();
    const auto note_turn = [&] {
      if (recorded) recorded->turns.push_back(recording.tape().num_nodes());
    };
    if (recorded) recorded->turns.clear();
    const int64_t runs = in_turn ? 1 : config_.sharding.pipeline_runs;
    for (const auto [kind, micro, run] : in_turn ? one_forward_one_backward(0, 1, t.micro_batches) : turns_) {
      note_turn();
      const auto m = static_cast<size_t>(micro);
      if (kind == Turn::backward_weight) {
        recording.backward_weights();
        continue;
      }
      if (kind != Turn::forward) {
        const Tensor of = run == 0 ? std::exchange(scaled[m], {}) : scaled[m];
        recording.backward(of, {.last_micro_batch = micro + 1 == t.micro_batches, .one_part = runs > 1,
                                .weights_later = kind == Turn::backward_input});
        if (run > 0) continue;
        loss = loss ? add(loss, parts[m]) : parts[m];
        parts[m] = Tensor();
        continue;
      }
      const StepInputs::MicroBatch& batch = inputs_->micro_batch(micro);
      const int64_t sample = first + t.batch * micro / t.micro_batches;
      run == 0 ? recording.next_micro_batch(sample, batch.random_state) : recording.resume_micro_batch(sample, batch.random_state);
      parts[m] = model_->loss_until(end_of_run(run, runs), forwards[m], batch.tokens, batch.targets, mean);
      if (run + 1 == runs) scaled[m] = scaler_ ? scaler_->scale(parts[m]) : parts[m];
    }
    note_turn();
    if (scaler_) result.grad_norm = clip_grad_norm(*model_, t.clip > 0 ? t.clip : kNoClipping, *scaler_);
    else if (t.clip > 0) result.grad_norm = clip_grad_norm(*model_, t.clip);
    else result.grad_norm = grad_norm(*model_);
    optimizer_->step({.lr = lr, .scalars = inputs_->scalars()});
    if (scaler_) scaler_->update();
    {
      const PhaseScope update(Phase::update);
      loss = redistribute(loss, Layout(mesh_.spec, Placement::invariant()));
    }
    if (recorded) {
      recorded->loss = recording.value_of(loss);
      recorded->grad_norm = recording.value_of(result.grad_norm);
      recorded->leaves = recording.captured();
      recorded->memory = recording.leaves();
      recorded->reruns = recording.reruns();
      recorded->tape = recording.take();
    }
  }
  optimizer_->zero_grad();
  result.loss = loss;
  return result;
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
  const ValueId wanted[] = {compiled_.loss, compiled_.grad_norm};
  program_ = std::make_unique<Program>(std::exchange(compiled_.tape, {}), [this](ValueId v) { return compiled_.memory.at(v); },
                                       wanted);
  if (const int64_t budget = config_.sharding.memory_budget; budget > 0)
    program_ = std::make_unique<Program>(keep_within(budget, world_, device_)(*program_));
  compiled_.memory.clear();
  compiled_.leaves.clear();
  return result;
}

TrainingStep::Result TrainingStep::run_program(double lr, RecordedStep* recorded) {
  for (const auto& effect : compiled_.reruns) effect();
  if (recorded) {
    recorded->tape = program_->tape();
    recorded->loss = compiled_.loss, recorded->grad_norm = compiled_.grad_norm;
    for (const ValueId v : program_->tape().leaves()) {
      recorded->memory[v] = program_->leaf(v);
      if (recorded->capture_leaves) recorded->leaves[v] = program_->leaf(v).clone();
    }
  }
  const std::vector<Tensor> values = program_->run();
  return {values[0], values[1], lr};
}

TrainingStep::Result TrainingStep::replay(int64_t step, double lr, RecordedStep* recorded) {
  if (!graph_) {
    if (program_) program_->reserve();
    GpuCapture capture(RankContext::current().gpu_of(device_));
    captured_ = program_ ? run_program(lr, &captured_step_) : record(step, lr, &captured_step_);
    captured_step_.memory.clear();
    graph_ = capture.finish();
  } else {
    for (const auto& effect : (program_ ? compiled_ : captured_step_).reruns) effect();
  }
  graph_->replay();
  if (recorded) *recorded = captured_step_;
  captured_.lr = lr;
  return captured_;
}

double TrainingStep::evaluate(const SequentialWindows& windows) {
  const DeviceScope scope(device_);
  if (program_ && !graph_) program_->release();  // a graph keeps using its memory
  std::optional<CollectivesInTurn> in_turn;
  if (!std::exchange(evaluated_, true)) in_turn.emplace();
  model_->eval();
  // In the micro-batches of training, added in their order, so that a world of k ranks gives the bits of one rank with k
  // micro-batches.
  const int64_t rows = config_.train.batch, micro_batches = config_.train.micro_batches, pipeline_runs = config_.sharding.pipeline_runs;
  // Outside of a recording who sends waits until it is received, so one stage of a ring is free.
  const int64_t at_once = pipeline_runs > 1 ? mesh_.size("stage") - 1 : 1;
  const auto fill = [&](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    windows.fill(first, count, inputs, targets);
  };
  double sum = 0;
  for (int64_t first = 0; first < windows.num_windows(); first += rows) {
    inputs_->set_samples(first, fill);
    Tensor total;
    for (int64_t begin = 0; begin < micro_batches; begin += at_once) {
      const int64_t end = std::min(begin + at_once, micro_batches);
      std::vector<ForwardProgress> forwards(static_cast<size_t>(at_once));
      for (int64_t run = 0; run < pipeline_runs; ++run)
        for (int64_t micro = begin; micro < end; ++micro) {
          const StepInputs::MicroBatch& batch = inputs_->micro_batch(micro);
          const Tensor part = model_->loss_until(end_of_run(run, pipeline_runs), forwards[static_cast<size_t>(micro - begin)],
                                                 batch.tokens, batch.targets, {.divide_by = 1});
          if (part) total = total ? add(total, part) : part;
        }
    }
    sum += redistribute(total, Layout(mesh_.spec, Placement::invariant())).item<double>();
  }
  return sum / static_cast<double>(windows.num_targets());
}

}  // namespace sheaf::models
