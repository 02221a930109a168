// train.update_in_backward: the same training, bit for bit, in less memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 4;

models::TrainConfig updating(models::TrainConfig config) {
  config.train.update_in_backward = true;
  return config;
}

TEST(UpdateInBackward, ChangesNoBit) {
  const auto same_with = [](int world, auto&& change) {
    models::TrainConfig c = tiny_config();
    c.model.dropout = 0.2;
    c.train.clip = 0;
    change(c);
    expect_same_bits(train_tiny(updating(c), world, kSteps), train_tiny(c, world, kSteps));
    expect_planned_tapes(updating(c), world);
  };
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const int world : {1, 3}) same_with(world, [&](auto& c) { c.sharding.strategy = strategy, c.train.micro_batches = world; });
  same_with(2, [](auto& c) { c.train.dtype = "bf16", c.sharding.reduce_dtype = "int8"; });
  same_with(2, [](auto& c) { c.train.optimizer = "muon"; });
  same_with(2, [](auto& c) { c.train.recompute = "block"; });
  same_with(2, [](auto& c) { c.train.compile = true; });
  same_with(2, [](auto& c) { c.train.islands = 2, c.train.inner_steps = 2, c.train.batch = 8; });
  same_with(4, [](auto& c) { c.sharding.replicas = 2, c.sharding.secondary = true, c.train.micro_batches = 2; });
  same_with(4, [](auto& c) { c.sharding.tensor = 2; });
  same_with(4, [](auto& c) { c.sharding.context = 2; });
  same_with(4, [](auto& c) { c.model = tiny_mixture(1.1), c.sharding.experts = 2; });
  same_with(2, [](auto& c) { c.model = tiny_biased_mixture(), c.sharding.experts = 2; });
  same_with(2, [](auto& c) { c.sharding.pipeline = 2, c.train.micro_batches = 3; });
  same_with(2, [](auto& c) { c.sharding.pipeline = 2, c.sharding.pipeline_runs = 2, c.model.layers = 4, c.train.micro_batches = 4; });
  same_with(2, [](auto& c) { c.sharding.pipeline = 2, c.sharding.pipeline_schedule = "zero_bubble", c.train.micro_batches = 3; });
}

// Of one rank with 12 blocks: with little else in memory. The peak is where the backward begins, no longer where it ends.
TEST(UpdateInBackward, LeavesOutTheGradientsOfAllButAFewUnits) {
  models::TrainConfig c = tiny_config();
  c.model.layers = 12, c.model.width = 64, c.train.clip = 0, c.train.batch = 1;
  const auto peak = [](const models::TrainConfig& config) { return models::plan_step(config, 13, 0, 1, 1, "shm").peak.bytes; };
  const int64_t block = 12 * 64 * 64 * 4;
  EXPECT_LT(peak(updating(c)), peak(c) - 8 * block);
}

TEST(UpdateInBackward, RefusesWhatNeedsAllGradients) {
  const auto refusal = [](auto&& change) -> std::string {
    models::TrainConfig c = updating(tiny_config());
    c.train.clip = 0;
    change(c);
    try {
      train_tiny(c, 1, 1);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(refusal([](auto& c) { c.train.clip = 1; }), ::testing::HasSubstr("train.update_in_backward with train.clip 1"));
  EXPECT_THAT(refusal([](auto& c) { c.train.dtype = "f16"; }), ::testing::HasSubstr("train.update_in_backward with train.dtype f16"));
  EXPECT_THAT(refusal([](auto& c) { c.train.log_norms = "units"; }), ::testing::HasSubstr("train.update_in_backward with train.log_norms units"));
}

}  // namespace
}  // namespace sheaf::testing
