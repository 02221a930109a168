// Mixtures like DeepSeek-V3's: the bias used to choose experts is a parameter whose gradient counts choices. Gradients in f64, counts
// exactly; the bits of every strategy on the same mesh; one rank's steps; and a step's communication.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;

models::TrainConfig biased(int64_t ranks = 1, const char* strategy = "full_shard", int64_t tensor = 1, int64_t context = 1) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_biased_mixture();
  c.sharding.strategy = strategy;
  c.sharding.experts = ranks;
  c.sharding.tensor = tensor;
  c.sharding.context = context;
  return c;
}

bool is_bias(const std::string& name) { return name.ends_with(".choice_bias"); }
Values biases_of(const Values& all) {
  Values out;
  for (const auto& [name, values] : all)
    if (is_bias(name)) out[name] = values;
  return out;
}
Values others_of(const Values& all) {
  Values out;
  for (const auto& [name, values] : all)
    if (!is_bias(name)) out[name] = values;
  return out;
}

class BiasedExpertGradients : public ::testing::TestWithParam<std::tuple<Axes, std::string, int>> {};

TEST_P(BiasedExpertGradients, EqualUnshardedInF64) {
  const auto& [axes, strategy, rows] = GetParam();
  const Values expected = gradients_f64(Axes{{"data", 1}}, "replicate", rows, {}, tiny_biased_mixture());
  const Values actual = gradients_f64(axes, strategy, rows, {}, tiny_biased_mixture());
  EXPECT_EQ(max_difference(biases_of(expected), biases_of(actual)), 0) << "counts are whole numbers";
  const Values others = others_of(expected);
  EXPECT_LE(max_difference(others, others_of(actual)), 1e-12 * max_magnitude(others));
  ASSERT_EQ(biases_of(expected).size(), 2u);
  for (const auto& [name, counts] : biases_of(expected)) {
    double sum = 0, total = 0;
    for (const double count : counts) sum += count, total += count == std::round(count);
    EXPECT_EQ(total, 6) << name << ": whole numbers";
    EXPECT_EQ(sum, 0) << "what some have more than others";
  }
  EXPECT_GT(max_magnitude(biases_of(expected)), 5);
}

std::string mesh_name(const ::testing::TestParamInfo<BiasedExpertGradients::ParamType>& info) {
  std::string out = std::get<1>(info.param);
  for (const auto& axis : std::get<0>(info.param)) out += str("_", axis.name, axis.size);
  return out + "_" + std::to_string(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, BiasedExpertGradients,
    ::testing::Combine(::testing::Values(Axes{{"data", 1}, {"expert", 1}}, Axes{{"data", 3}}, Axes{{"data", 1}, {"expert", 2}},
                                         Axes{{"data", 2}, {"expert", 2}}, Axes{{"data", 1}, {"expert", 5}}, Axes{{"data", 2}, {"context", 2}},
                                         Axes{{"data", 1}, {"model", 2}}, Axes{{"expert", 2}, {"context", 3}},
                                         Axes{{"replica", 2}, {"data", 2}},
                                         Axes{{"data", 1}, {"expert", 2}, {"context", 2}, {"model", 2}}),
                       ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate"), ::testing::Values(7, 1)), mesh_name);
INSTANTIATE_TEST_SUITE_P(Secondary, BiasedExpertGradients,
                         ::testing::Combine(::testing::Values(Axes{{"secondary", 2}, {"data", 2}, {"expert", 2}}),
                                            ::testing::Values("full_shard", "zero1"), ::testing::Values(7)), mesh_name);

TEST(BiasedExperts, AStepMovesTheBiasByItsRateAlone) {
  for (const char* optimizer : {"adamw", "muon"})
    for (const int64_t micro_batches : {1, 2}) {
      models::TrainConfig c = biased();
      c.train.optimizer = optimizer;
      c.train.micro_batches = micro_batches;
      c.train.clip = 1e-3;  // must not affect the bias
      const auto run = [&](double rate, double lr) {
        c.model.expert_balance_rate = rate;
        c.train.lr = lr;
        return train_tiny(c, 2, 1);
      };
      const TrainedRun once = run(0.02, 1e-3), faster = run(0.02, 1e-2), twice = run(0.04, 1e-3), still = run(0, 1e-3);
      EXPECT_EQ(once.norms, still.norms) << "the norm is of slopes";
      EXPECT_EQ(max_difference(others_of(once.parameters), others_of(still.parameters)), 0);
      EXPECT_EQ(max_difference(biases_of(once.parameters), biases_of(faster.parameters)), 0) << "no learning rate";
      int64_t moved = 0;
      for (const auto& [name, values] : biases_of(once.parameters))
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_EQ(values[i], static_cast<float>(values[i] > 0 ? 0.02 : values[i] < 0 ? -0.02 : 0));
          EXPECT_EQ(twice.parameters.at(name)[i], 2 * values[i]);
          EXPECT_EQ(still.parameters.at(name)[i], 0);
          moved += values[i] != 0;
        }
      EXPECT_GE(moved, 8) << "of 12";
    }
}

// What has a factor of 0 stays as it is, although no learning rate moves it.
TEST(BiasedExperts, AFactorOfZeroKeepsTheBiasToo) {
  models::TrainConfig c = biased();
  c.train.lr_factors = "0 blocks.0.*";
  const TrainedRun run = train_tiny(c, 2, 3);
  for (const auto& [name, values] : biases_of(run.parameters))
    EXPECT_EQ(std::ranges::all_of(values, [](double x) { return x == 0; }), name.starts_with("blocks.0.")) << name;
}

TEST(BiasedExperts, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  struct Case { int tensor, context, world; };
  for (const auto& [tensor, context, world] : {Case{1, 1, 2}, Case{1, 1, 4}, Case{2, 1, 4}, Case{1, 3, 6}}) {
    SCOPED_TRACE(str(tensor, " ", context, " ", world));
    const auto config = [&](const char* strategy) { return biased(2, strategy, tensor, context); };
    const TrainedRun expected = train_tiny(config("full_shard"), world, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"})
      expect_same_bits(expected, train_tiny(config(strategy), world, kSteps));
    models::TrainConfig c = config("full_shard");
    c.sharding.prefetch_bytes = 0;
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c = config("full_shard");
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c = config("full_shard");
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
  }
}

TEST(BiasedExperts, TrainsAsOneRankDoes) {
  models::TrainConfig c = biased();
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  for (const auto& [ranks, world] : {std::pair{1, 3}, {2, 2}, {2, 4}, {5, 5}}) {
    c.sharding.experts = ranks;
    const TrainedRun actual = train_tiny(c, world, kSteps);
    EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << ranks << " " << world;
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
  }
  c.sharding.experts = 1;
  c.train.micro_batches = 3;
  expect_stages_of_one_rank(c, 3);
}

// Biases and their counts stay in f32, whatever dtype other gradients are communicated in.
TEST(BiasedExperts, NothingRoundsTheBias) {
  models::TrainConfig c = biased(2);
  c.train.dtype = "bf16";
  c.sharding.reduce_dtype = "bf16";
  c.model.expert_balance_rate = 0.001;  // which bf16 would lose
  int64_t seen = 0;
  const TrainedRun run = train_tiny(c, 4, kSteps, [&](models::TrainingStep& step) {
    if (step.world().rank() != 0) return;
    for (const auto& unit : units(step.model()))
      for (const FlatBuffer& b : unit->buffers()) {
        if (b.steered == 0) continue;
        EXPECT_EQ(b.compute, kF32);
        EXPECT_EQ(b.reduce, kF32);
        EXPECT_EQ(b.name, "blocks." + unit->name().substr(7) + " steered");
        ++seen;
      }
  });
  EXPECT_EQ(seen, 2);
  for (const auto& [name, values] : biases_of(run.parameters))
    for (const float x : values) EXPECT_NEAR(x / 0.001f, std::round(x / 0.001f), 1e-3) << name << ": whole steps";
  for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
    c.sharding.strategy = strategy;
    const TrainedRun other = train_tiny(c, 4, kSteps);
    expect_same_bits(run, other);
  }
}

TEST(BiasedExperts, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const auto& [ranks, tensor, world] : {std::tuple{1, 1, 2}, {2, 1, 4}, {2, 2, 4}}) {
      SCOPED_TRACE(str(strategy, " ", ranks, " ", tensor, " ", world));
      models::TrainConfig c = biased(ranks, strategy, tensor);
      c.train.micro_batches = 2;
      expect_planned_tapes(c, world);
    }
  models::TrainConfig c = biased(2);
  c.train.dtype = "bf16";
  c.train.recompute = "block";
  c.sharding.secondary = true;
  expect_planned_tapes(c, 4);
  c.train.compile = true;
  expect_planned_tapes(c, 4);
}

TEST(BiasedExperts, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"data", 1}, {"expert", 2}}, {{"data", 2}, {"expert", 2}}, {{"data", 1}, {"model", 2}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, tiny_biased_mixture());
}

// Starting from a bias that prefers some experts, so that others are never chosen, the load evens out without an auxiliary loss.
TEST(BiasedExperts, TheLoadEvensOut) {
  const auto excess = [](double rate) {  // the most loaded expert's load over an even share, before and after
    models::TrainConfig c = biased(2);
    c.model.routing_groups = c.model.routing_groups_per_token = 1;
    c.model.expert_balance_rate = rate;
    c.train.steps = 80;
    std::pair<double, double> out;
    train_tiny(c, 2, 0, [&](models::TrainingStep& step) {
      auto& llama = dynamic_cast<models::Llama&>(step.model());
      const auto worst = [&] {
        const TinyBatch batch = tiny_batch(step.mesh(), 0, 7);
        {
          Recording recording;
          recording.backward(step.model().loss(batch.tokens, batch.targets));
        }
        double most = 0;
        for (const int64_t block : {1, 2}) {
          const nn::Parameter& bias = llama.blocks[block].moe->choice_bias;
          for (const double e : full_gradient(bias).to_vector<double>()) most = std::max(most, e / (7 * 9 * 3));
        }
        for (const auto& unit : units(step.model())) unit->zero_grad();
        return most;
      };
      for (const int64_t block : {1, 2})
        assign(llama.blocks[block].moe->choice_bias, Tensor::from(std::vector<float>{0.1f, -0.1f, 0, 0.1f, 0.1f, 0}, {6}));
      const double before = worst();
      for (int s = 0; s < 80; ++s) step.run(s, tiny_data(c));
      const double after = worst();
      if (step.world().rank() == 0) out = {before, after};
    });
    return out;
  };
  const auto [before, after] = excess(0.002);
  EXPECT_NEAR(before, 1.0, 0.02) << "three experts have all choices, twice their share";
  EXPECT_LT(after, 0.3);
  EXPECT_GT(excess(1e-9).second, 0.7);
}

TEST(BiasedExperts, WhatCannotBeIsRefused) {
  models::TrainConfig c = biased();
  c.model.dense_layers = 3;
  EXPECT_THAT(refusal(2, c), HasSubstr("of 3 blocks the first 3 have no mixture: none has"));
  c = biased();
  c.model.expert_affinity = "tanh";
  EXPECT_THAT(refusal(2, c), HasSubstr("unknown expert_affinity 'tanh'; known: softmax, sigmoid"));
  c = biased();
  c.model.routing_groups_per_token = 1;
  EXPECT_THAT(refusal(2, c), HasSubstr("3 choices among 1 of 3 equal groups of 6 experts"));
}

}  // namespace
}  // namespace sheaf::testing
