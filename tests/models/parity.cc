#include "sheaf/tests/models/parity.h"

#include <cmath>

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
               const std::function<void(models::TrainingStep&)>& inspect) {
  TrainedRun run;
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, Device::cpu());
    for (int s = 0; s < steps; ++s) {
      const auto result = step.run(s, fill_tiny);
      if (w.rank() != 0) continue;
      run.losses.push_back(result.loss.item());
      run.norms.push_back(result.grad_norm.item());
    }
    whole.collect(step.model().module(), false);
    if (inspect) inspect(step);
  }, {.threads_per_rank = 1});
  run.parameters = whole.values();
  return run;
}

}  // namespace sheaf::testing
