#include "sheaf/tests/models/parity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf::testing {

double max_difference(const Values& a, const Values& b) {
  double worst = 0;
  if (a.size() != b.size()) fail<ShapeError>("[parity] ", a.size(), " and ", b.size(), " tensors");
  for (const auto& [name, x] : a) {
    const std::vector<double>& y = b.at(name);
    if (x.size() != y.size()) fail<ShapeError>("[parity] ", name, " has ", x.size(), " and ", y.size(), " elements");
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(y[i])) return INFINITY;
      worst = std::max(worst, std::abs(x[i] - y[i]));
    }
  }
  return worst;
}

double max_magnitude(const Values& a) {
  double most = 0;
  for (const auto& [name, x] : a)
    for (double v : x) most = std::max(most, std::abs(v));
  return most;
}

std::vector<float> shards(nn::Module& module) {
  std::vector<float> all;
  for (const auto& unit : units(module))
    for (const FlatBuffer& buffer : unit->buffers()) {
      const std::vector<float> values = buffer.shard.to_vector();
      all.insert(all.end(), values.begin(), values.end());
    }
  return all;
}

models::TrainConfig tiny_config() {
  models::TrainConfig c;
  c.model.layers = 3;
  c.model.heads = 2;
  c.model.width = 20;
  c.model.context = 9;
  c.model.vocab = 13;
  c.model.bias = true;
  c.train.steps = 20;
  c.train.batch = 7;
  c.train.warmup = 3;
  c.train.clip = 0.5;
  c.train.lr = 3e-3;
  return c;
}

models::TrainConfig tiny_rank_config(const std::string& strategy) {
  models::TrainConfig c = tiny_config();
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  c.sharding.strategy = strategy;
  return c;
}

void fill_tiny(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
  const models::TrainConfig c = tiny_config();
  for (int64_t s = 0; s < count; ++s)
    for (int64_t t = 0; t < c.model.context; ++t) {
      const int64_t at = s * c.model.context + t;
      const auto token = [&](int64_t i) { return static_cast<int32_t>(((first + s) * 7 + i * i * 3 + i) % c.model.vocab); };
      inputs[at] = token(t);
      targets[at] = token(t + 1);
    }
}

TrainedRun train_tiny(const models::TrainConfig& config, int world, int steps,
                      const std::function<void(models::TrainingStep&)>& inspect, Device device) {
  TrainedRun run;
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, device);
    for (int s = 0; s < steps; ++s) {
      const auto result = step.run(s, fill_tiny);
      if (w.rank() != 0) continue;
      run.losses.push_back(result.loss.item());
      run.norms.push_back(result.grad_norm.item());
    }
    whole.collect(step.model().module(), false);
    if (inspect) inspect(step);
  }, {.threads_per_rank = 1, .device = device});
  run.parameters = whole.values();
  return run;
}

void expect_same_bits(const TrainedRun& a, const TrainedRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(max_difference(a.parameters, b.parameters), 0.0);
}

std::unique_ptr<models::LanguageModel> tiny_model_f64(const Mesh& mesh, ShardOptions options, Device device, uint64_t seed) {
  const models::ModelConfig config = tiny_config().model;
  std::unique_ptr<models::LanguageModel> model = models::make_language_model(config, config.vocab);
  if (mesh.spec->num_axes() > 1) options.replica_axis = "replica";
  options.units = nn::units_where([&](nn::Module& m, const std::string&) { return model->is_block(m); });
  shard(model->module(), mesh, options);
  materialize(model->module(), device, {.seed = seed, .dtype = kF64});
  return model;
}

TinyBatch tiny_batch(const Mesh& mesh, int64_t first, int64_t rows, Device device) {
  const Type type{kI32, {rows, tiny_config().model.context}, Layout(mesh.spec, Placement::shard(0))};
  const Tensor tokens = Tensor::empty(type), targets = Tensor::empty(type);
  fill_tiny(first + type.layout.local_start(type.shape)[0], tokens.local_shape()[0], tokens.view().as<int32_t>(),
            targets.view().as<int32_t>());
  return {tokens.to(device), targets.to(device)};
}

Values gradients_f64(int world, const std::string& strategy, int64_t rows, Device device, int replicas) {
  Whole whole;
  run_local(world, [&](World& w) {
    const Mesh mesh = replicas > 0 ? w.mesh({{"replica", replicas}, {"data", w.size() / replicas}})
                                   : w.mesh({{"data", w.size()}});
    const auto model = tiny_model_f64(mesh, {.strategy = strategy}, device);
    const TinyBatch batch = tiny_batch(mesh, 0, rows, device);
    const DeviceScope scope(device);
    Recording recording;
    recording.backward(model->loss(batch.tokens, batch.targets, static_cast<double>(batch.tokens.numel())));
    whole.collect(model->module(), true);
  }, {.threads_per_rank = 1, .device = device});
  return whole.values();
}

}  // namespace sheaf::testing
