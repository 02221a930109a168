// Norms of parameters and gradients, against sums of squares, on meshes of 1 to 11 ranks.
#include "sheaf/nn/parameter_norms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"
#include "sheaf/tests/nn/zoo.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

double norm_of(int64_t count, const std::function<double(int64_t)>& value) {
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) squares += value(i) * value(i);
  return std::sqrt(squares);
}

TEST(ParameterNorms, AreThoseOfTheWholeHoweverItIsCut) {
  for (const Way& way : ways())
    on(way, [&](World&, const Mesh& mesh, const ShardOptions& options) {
      Zoo zoo;
      zoo.tall.freeze();
      start(zoo, mesh, options);
      set_gradients(zoo, 3);
      const std::vector<nn::Parameter> parameters = zoo.parameters();
      const Tensor gradients = grad_norms(parameters), weights = parameter_norms(parameters);
      EXPECT_TRUE(gradients.layout().all_invariant());
      double squares = 0;
      for (size_t i = 0; i < parameters.size(); ++i) {
        const nn::Parameter& p = parameters[i];
        const double of_gradient = gradients.to_vector<double>()[i], of_weight = weights.to_vector<double>()[i];
        EXPECT_NEAR(of_gradient, p.trainable() ? norm_of(p.numel(), [](int64_t k) { return gradient(k, 3); }) : 0, 1e-12) << p.name();
        EXPECT_NEAR(of_weight, p.trainable() ? norm_of(p.numel(), initial) : 0, 1e-12) << p.name();
        squares += of_gradient * of_gradient;
      }
      EXPECT_NEAR(std::sqrt(squares), grad_norm(zoo).item<double>(), 1e-10);
      EXPECT_EQ(grad_norms(zoo).to_vector<double>(), gradients.to_vector<double>());
      EXPECT_EQ(parameter_norms(zoo).to_vector<double>(), weights.to_vector<double>());
    });
}

TEST(ParameterNorms, BitsDoNotDependOnWorldStrategyOrUnits) {
  std::vector<double> expected;
  for (int world = 1; world <= 5; ++world)
    for_each_sharding(world, [&](Strategy strategy, const nn::UnitPolicy& units_by, int64_t prefetch, const char* name) {
      run_local(world, [&](World& w) {
        TinyModel m(3);
        const Mesh mesh = strategy == Strategy::none ? Mesh{} : w.mesh({{"data", world}});
        shard(m, mesh, {.units = units_by, .strategy = strategy, .prefetch_bytes = prefetch});
        materialize(m, w.device(), {.seed = 4});
        const std::vector<double> norms = parameter_norms(m.parameters()).to_vector<double>();
        if (w.rank() != 0) return;
        if (expected.empty()) expected = norms;
        EXPECT_EQ(norms, expected) << name << " at " << world;
      }, kLocal);
    });
}

TEST(ParameterNorms, OfSomeParametersOfAUnitInAnyOrder) {
  Zoo zoo;
  start(zoo, {}, {});
  EXPECT_EQ(grad_norms(zoo.parameters()).to_vector<double>(), std::vector<double>(zoo.parameters().size(), 0.0)) << "there are none";
  set_gradients(zoo, 0);
  const std::vector<nn::Parameter> some{zoo.row, zoo.wide};
  const std::vector<double> norms = grad_norms(some).to_vector<double>();
  ASSERT_EQ(norms.size(), 2u);
  EXPECT_NEAR(norms[0], norm_of(8, [](int64_t i) { return gradient(i, 0); }), 1e-12);
  EXPECT_NEAR(norms[1], norm_of(28, [](int64_t i) { return gradient(i, 0); }), 1e-12);
  zoo.wide.unit()->buffers()[0].grad.view().as<double>()[0] = INFINITY;
  EXPECT_TRUE(std::isinf(grad_norms(some).to_vector<double>()[1]));
  EXPECT_EQ(grad_norms(some).to_vector<double>()[0], norms[0]);
}

TEST(ParameterNorms, HaveNoFactorOfTheLoss) {
  Zoo zoo;
  start(zoo, {}, {});
  set_gradients(zoo, 0);
  const optim::LossScaler scaler(Device::cpu(), {.initial = 8});
  const std::vector<nn::Parameter> all = zoo.parameters();
  const std::vector<double> norms = grad_norms(all).to_vector<double>(), scaled = grad_norms(all, scaler).to_vector<double>();
  EXPECT_EQ(grad_norms(zoo, scaler).to_vector<double>(), scaled);
  for (size_t i = 0; i < norms.size(); ++i) EXPECT_EQ(scaled[i], norms[i] / 8);
}

TEST(ParameterNorms, RefusesWhatItCannotMean) {
  Zoo zoo;
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { parameter_norms(zoo.parameters()); }), HasSubstr("parameter 'wide' has no memory"));
  start(zoo, {}, {});
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { parameter_norms(std::vector{zoo.wide, zoo.wide}); }), HasSubstr("given twice"));
}

}  // namespace
}  // namespace sheaf::testing
