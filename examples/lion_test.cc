// A user-defined optimizer against its formula, on any number of ranks.
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
