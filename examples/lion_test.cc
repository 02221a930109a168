// A user-defined optimizer against its formula, on any number of ranks; and the same one written in public ops, which run on every device.
#include "sheaf/examples/lion.h"

#include <cmath>

#include <gtest/gtest.h>

namespace examples {
namespace {

using namespace sheaf;

struct Net : nn::Module {
  nn::Linear up{5, 7}, down{7, 3};
  Tensor forward(const Tensor& x) { return down(tanh(up(x))); }
  SHEAF_FIELDS(up, down);
};

Tensor rows() {
  std::vector<double> x;
  for (int i = 0; i < 6 * 5; ++i) x.push_back(0.1 * (i * 7 % 11) - 0.4);
  return Tensor::from(x, {6, 5});
}

using Values = std::vector<std::vector<double>>;

double lr_factor(const nn::Parameter& p) { return p.name() == "down.weight" ? 3 : 1; }

/// Parameters after some steps; the gradients of each step are appended to `seen`.
Values train(int ranks, const std::string& strategy, int steps, double norm, std::vector<Values>* seen = nullptr) {
  Values out;
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", ranks}});
    Net model;
    shard(model, mesh, {.units = nn::units_of<nn::Linear>(), .strategy = strategy});
    materialize(model, world.device(), {.seed = 2, .dtype = kF64});
    Lion lion(model, {.lr = 0.01, .factors = {.lr = lr_factor}});
    for (int step = 0; step < steps; ++step) {
      {
        Recording recording;
        recording.backward(sum(square(model(redistribute(rows(), Layout(mesh.spec, Placement::shard(0)))))));
        clip_grad_norm(model, norm);
        if (!seen) lion.step();
      }
      if (seen) {
        Values gradients;
        for (const nn::Parameter& p : model.parameters()) gradients.push_back(full_gradient(p).to_vector<double>());
        seen->push_back(std::move(gradients));
        lion.step();
      }
      lion.zero_grad();
    }
    for (const nn::Parameter& p : model.parameters()) {
      const auto values = full_parameter(p).to_vector<double>();
      if (world.rank() == 0) out.push_back(values);
    }
  });
  return out;
}

TEST(Lion, IsItsFormula) {
  constexpr double kNorm = 0.5, kLr = 0.01;
  std::vector<Values> gradients;
  const Values start = train(1, "full_shard", 0, kNorm), end = train(1, "full_shard", 4, kNorm, &gradients);
  Values expected = start, m = start;
  for (auto& of : m) std::fill(of.begin(), of.end(), 0.0);
  for (const Values& g : gradients) {
    double norm = 0;
    for (const auto& of : g)
      for (const double x : of) norm += x * x;
    const double scale = std::min(1.0, kNorm / (std::sqrt(norm) + 1e-6));
    for (size_t p = 0; p < g.size(); ++p)
      for (size_t i = 0; i < g[p].size(); ++i) {
        const double u = 0.9 * m[p][i] + 0.1 * scale * g[p][i], decay = p % 2 == 0 ? 1.0 : 0.0;  // for matrices only
        expected[p][i] -= kLr * (p == 2 ? 3 : 1) * ((u > 0) - (u < 0) + decay * expected[p][i]);
        m[p][i] = 0.99 * m[p][i] + 0.01 * scale * g[p][i];
      }
  }
  for (size_t p = 0; p < end.size(); ++p)
    for (size_t i = 0; i < end[p].size(); ++i) EXPECT_NEAR(end[p][i], expected[p][i], 1e-12) << p << ' ' << i;
  EXPECT_NE(end, start);
}

/// A number that all ranks have, as operand for values of this buffer: Replicate on the axes that shard it.
Tensor beside(const Tensor& number, const Tensor& buffer) {
  Layout layout = buffer.layout();
  for (int a = 0; a < layout.num_axes(); ++a)
    if (layout[a].is_shard()) layout[a] = Placement::replicate();
  return redistribute(number, layout);
}

/// Lion without weight decay.
struct LionOfOps final : optim::Optimizer {
  std::vector<Tensor> lr_factors;  // for each shard, of its type

  explicit LionOfOps(nn::Module& model, const optim::Factors& factors)
      : Optimizer("lion_of_ops", model.parameters(), factors, /*states=*/{"m"}, {}) {
    for (const optim::ShardState& shard : shards()) {
      const Tensor& x = shard.flat().shard;
      std::vector<double> values(static_cast<size_t>(x.local_shape().numel()), 1.0);
      const std::vector<double> rows = shard.segments.to_vector<double>();  // begin, end, factors of learning rate and weight decay
      for (size_t k = 0; k < rows.size(); k += 4)
        std::fill(values.begin() + static_cast<int64_t>(rows[k]), values.begin() + static_cast<int64_t>(rows[k + 1]), rows[k + 2]);
      lr_factors.push_back(Tensor::from_local(values, x.type()).to(x.device()));
    }
  }

 private:
  std::vector<double> scalars(const optim::StepOptions& step, int64_t /*number*/) const override { return {step.lr.value_or(0.01)}; }
  void update(optim::ShardState& shard, const Tensor& scalars) override {
    const FlatBuffer& b = shard.flat();
    const Tensor &x = b.shard, &m = shard.state[0];
    const Tensor gradient = b.grad_scale ? b.grad * beside(b.grad_scale, x) : b.grad;
    const Tensor lr = cast(scalars, x.dtype()) * lr_factors[static_cast<size_t>(&shard - shards().data())];
    Tensor next = x - lr * sign(0.9 * m + 0.1 * gradient), next_m = 0.99 * m + 0.01 * gradient;
    if (b.found_inf) {
      const Tensor skipped = beside(b.found_inf, x);
      next = where(skipped, x, next), next_m = where(skipped, m, next_m);
    }
    store_into(x, next);
    store_into(m, next_m);
  }
};

TEST(LionOfOps, IsLion) {
  for (const int ranks : {1, 2, 3})
    for (const char* strategy : {"full_shard", "replicate"})
      run_local(ranks, [&](World& world) {
        const Mesh mesh = world.mesh({{"data", ranks}});
        Net a, b;
        for (Net* model : {&a, &b}) {
          shard(*model, mesh, {.units = nn::units_of<nn::Linear>(), .strategy = strategy});
          materialize(*model, world.device(), {.seed = 2, .dtype = kF64});
        }
        Lion lion(a, {.lr = 0.01, .weight_decay = 0, .factors = {.lr = lr_factor}});
        LionOfOps of_ops(b, {.lr = lr_factor});
        const auto step = [&](Net& model, optim::Optimizer& optimizer, bool overflows) {
          optim::LossScaler scaler(world.device());
          Recording recording;
          const Tensor loss = sum(square(model(redistribute(rows(), Layout(mesh.spec, Placement::shard(0))))));
          recording.backward(scaler.scale(loss * (overflows ? HUGE_VAL : 1)));
          clip_grad_norm(model, 0.5, scaler);
          optimizer.step();
          optimizer.zero_grad();
        };
        for (int i = 0; i < 5; ++i) step(a, lion, i == 2), step(b, of_ops, i == 2);
        const auto values = a.parameters(), others = b.parameters();
        for (size_t p = 0; p < values.size(); ++p) {
          const auto x = full_parameter(values[p]).to_vector<double>(), y = full_parameter(others[p]).to_vector<double>();
          for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-12) << values[p].name() << ' ' << ranks << strategy;
        }
      });
}

TEST(Lion, KnowsNothingOfRanks) {
  const Values one = train(1, "full_shard", 5, 0.5);
  for (int ranks : {2, 3})
    for (const char* strategy : {"full_shard", "zero1", "replicate"}) {
      const Values many = train(ranks, strategy, 5, 0.5);
      for (size_t p = 0; p < one.size(); ++p)
        for (size_t i = 0; i < one[p].size(); ++i) EXPECT_NEAR(many[p][i], one[p][i], 1e-12) << ranks << strategy;
    }
}

}  // namespace
}  // namespace examples
