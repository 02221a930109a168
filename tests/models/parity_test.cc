// The guarantees of distributed training, on a small GPT: gradients in f64 at uneven sizes, and in f32 the same bits whatever the strategy,
// the prefetch and, with accumulation, the world size.
#include "sheaf/tests/models/parity.h"

#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 20;

TrainedRun reference(int world) {
  models::TrainConfig c = tiny_config();
  return train_tiny(c, world, kSteps);
}

class GradientParity : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {};

TEST_P(GradientParity, EqualsUnshardedInF64) {
  const auto [strategy, world, rows] = GetParam();
  const Values expected = gradients_f64(1, "replicate", rows), actual = gradients_f64(world, strategy, rows);
  EXPECT_GT(max_magnitude(expected), 1e-3);
  EXPECT_LE(max_difference(expected, actual), 1e-12 * max_magnitude(expected));
}

// 7 rows are not divisible by 2 to 5; with 3 rows, two of five ranks have none.
INSTANTIATE_TEST_SUITE_P(Worlds, GradientParity,
                         ::testing::Combine(::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate"),
                                            ::testing::Values(1, 2, 3, 4, 5), ::testing::Values(7, 3)));

TEST(Bitwise, AllStrategiesAgreeAtOneWorldSize) {
  for (int world : {2, 3}) {
    const TrainedRun expected = reference(world);
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      models::TrainConfig c = tiny_config();
      c.sharding.strategy = strategy;
      expect_same_bits(expected, train_tiny(c, world, kSteps));
    }
  }
}

TEST(Bitwise, WorldOneEqualsEveryStrategyAndIssuesNoCollective) {
  const TrainedRun expected = reference(1);
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    models::TrainConfig c = tiny_config();
    c.sharding.strategy = strategy;
    expect_same_bits(expected, train_tiny(c, 1, kSteps, [](models::TrainingStep& step) {
      EXPECT_EQ(step.mesh().runtime->gather_lane(0).sequence(), 0u);
      EXPECT_EQ(step.mesh().runtime->reduce_lane(0).sequence(), 0u);
    }));
  }
}

TEST(Bitwise, RanksEqualMicroBatchesInRankOrder) {
  for (int world : {2, 3}) {
    SCOPED_TRACE(world);
    models::TrainConfig c = tiny_config();
    c.train.batch = 6;
    const TrainedRun ranks = train_tiny(c, world, kSteps);
    c.train.micro_batches = world;
    const TrainedRun micro = train_tiny(c, 1, kSteps);
    expect_same_bits(ranks, micro);
  }
}

TEST(Bitwise, PrefetchAndUnitsChangeNothing) {
  const TrainedRun expected = reference(3);
  models::TrainConfig c = tiny_config();
  c.sharding.prefetch_bytes = 0;
  expect_same_bits(expected, train_tiny(c, 3, kSteps));
  c.sharding.prefetch_bytes = int64_t{1} << 30;
  expect_same_bits(expected, train_tiny(c, 3, kSteps));
  c = tiny_config();
  c.sharding.units = "none";
  expect_same_bits(expected, train_tiny(c, 3, kSteps));
}

TEST(Lifetime, AStepBetweenForwardAndBackwardIsAnError) {
  for (const char* strategy : {"full_shard", "zero1", "replicate"})
    run_local(2, [&](World& w) {
      models::TrainConfig c = tiny_config();
      c.sharding.strategy = strategy;
      models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
      step.run(0, fill_tiny);
      const Type type{kI32, {c.train.batch, c.model.context}, Layout(step.mesh().spec, Placement::shard(0))};
      const Tensor tokens = full_of(type, 1);
      Recording recording;
      recording.backward(step.model().loss(tokens, tokens, {.divide_by = 1}));
      const Tensor loss = step.model().loss(tokens, tokens, {.divide_by = 1});
      step.optimizer().step({.lr = 0.1});
      try {
        recording.backward(loss);
        ADD_FAILURE() << "no error";
      } catch (const LifetimeError& e) {
        EXPECT_NE(std::string(e.what()).find("changed in place"), std::string::npos) << e.what();
      }
    }, {.threads_per_rank = 1});
}

TEST(Bitwise, TrainingLearns) {
  const TrainedRun run = reference(2);
  EXPECT_LT(run.losses.back(), run.losses.front() - 0.1f);
}

}  // namespace
}  // namespace sheaf::testing
