#include "sheaf/models/training_step.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/schedule.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

ShardOptions shard_options(const TrainConfig& config, const LanguageModel& model) {
  ShardOptions options;
  options.axis = "data";
  options.strategy = config.sharding.strategy;
  options.prefetch_bytes = config.sharding.prefetch_bytes;
  if (config.train.dtype == "bf16") options.compute_dtype = kBF16;
  else check<ConfigError>(config.train.dtype == "f32", "[train] train.dtype is ", config.train.dtype, ", not f32 or bf16");
  if (config.sharding.units == "block")
    options.units = nn::units_where([&model](nn::Module& m, const std::string&) { return model.is_block(m); });
  else if (config.sharding.units == "count")
    options.units = nn::units_of_at_least(config.sharding.min_parameters);
  return options;
}

}  // namespace

TrainingStep::TrainingStep(const TrainConfig& config, int64_t vocab, World& world, Device device)
    : config_(config), world_(world), device_(device), mesh_(world.mesh({{"data", world.size()}})),
      model_(make_language_model(config.model, vocab)) {
  const DeviceScope scope(device_);
  shard(model_->module(), mesh_, shard_options(config_, *model_));
  materialize(model_->module(), device_, {.seed = static_cast<uint64_t>(config_.train.seed)});
  optim::AdamWOptions options;
  options.beta1 = config_.train.beta1;
  options.beta2 = config_.train.beta2;
  options.eps = config_.train.eps;
  options.weight_decay = config_.train.weight_decay;
  optimizer_ = std::make_unique<optim::AdamW>(model_->module().parameters(), options);
}

double TrainingStep::learning_rate(int64_t step) const {
  const OptimizationConfig& t = config_.train;
  const optim::ScheduleOptions options{.peak = t.lr, .minimum = t.min_lr, .warmup = t.warmup, .total = t.steps};
  if (t.schedule == "linear") return optim::linear(step, options);
  if (t.schedule == "constant") return optim::constant(step, options);
  return optim::cosine(step, options);
}

TrainingStep::Batch TrainingStep::make_batch(int64_t rows, int64_t first, const FillBatch& fill) {
  const Type type{kI32, {rows, config_.model.context}, Layout(mesh_.spec, Placement::shard(0))};
  const Device filled = device_.is_meta() ? device_ : Device::cpu();
  Batch batch{Tensor::empty(type, filled), Tensor::empty(type, filled)};
  if (device_.is_meta()) return batch;
  const int64_t mine = batch.tokens.local_shape()[0];
  if (mine > 0)
    fill(first + type.layout.local_start(type.shape)[0], mine, batch.tokens.view().as<int32_t>(),
         batch.targets.view().as<int32_t>());
  return {batch.tokens.to(device_), batch.targets.to(device_)};
}

TrainingStep::Result TrainingStep::run(int64_t step, const FillBatch& fill, RecordedStep* recorded) {
  const DeviceScope scope(device_);
  const OptimizationConfig& t = config_.train;
  const auto targets = static_cast<double>(tokens_per_step());
  model_->module().train();
  Tensor loss;  // of the micro-batches so far, in order
  Result result;
  result.lr = learning_rate(step);
  {
    const int64_t first = step * t.batch;
    Recording recording({.step = step, .first_sample = first, .seed = static_cast<uint64_t>(t.seed),
                         .capture_leaves = recorded && recorded->capture_leaves});
    for (int64_t micro = 0; micro < t.micro_batches; ++micro) {
      const int64_t begin = t.batch * micro / t.micro_batches, end = t.batch * (micro + 1) / t.micro_batches;
      recording.next_micro_batch(first + begin);
      const Batch batch = make_batch(end - begin, first + begin, fill);
      Tensor part = model_->loss(batch.tokens, batch.targets, targets);
      recording.backward(part);
      loss = loss ? add(loss, part) : part;
    }
    if (t.clip > 0) result.grad_norm = clip_grad_norm(model_->module(), t.clip);
    else result.grad_norm = grad_norm(model_->module());
    optimizer_->step({.lr = result.lr});
    {
      const PhaseScope update(Phase::update);
      loss = redistribute(loss, Layout(mesh_.spec, Placement::invariant()));
    }
    if (recorded) {
      recorded->loss = recording.value_of(loss);
      recorded->grad_norm = recording.value_of(result.grad_norm);
      recorded->leaves = recording.captured();
      recorded->tape = recording.take();
    }
  }
  optimizer_->zero_grad();
  result.loss = loss;
  return result;
}

double TrainingStep::evaluate(const SequentialWindows& windows) {
  const DeviceScope scope(device_);
  model_->module().eval();
  // In the micro-batches of training, added in their order, so that a world of k ranks gives the bits of one rank with k
  // micro-batches.
  const int64_t rows = config_.train.batch, micro_batches = config_.train.micro_batches;
  const auto fill = [&](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    windows.fill(first, count, inputs, targets);
  };
  double sum = 0;
  for (int64_t first = 0; first < windows.num_windows(); first += rows) {
    Tensor total;
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      const int64_t begin = rows * micro / micro_batches, end = rows * (micro + 1) / micro_batches;
      const Batch batch = make_batch(end - begin, first + begin, fill);
      const Tensor part = model_->loss(batch.tokens, batch.targets, 1.0);
      total = total ? add(total, part) : part;
    }
    sum += redistribute(total, Layout(mesh_.spec, Placement::invariant())).item<double>();
  }
  return sum / static_cast<double>(windows.num_targets());
}

}  // namespace sheaf::models
