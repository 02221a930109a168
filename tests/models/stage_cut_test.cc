// Stages cut so that none waits for the head: its cost, and that the cut affects only speed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/distributed/machine.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/models/stage_cut.h"
#include "sheaf/models/step_time.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

models::TrainConfig llama3_8b() {
  models::TrainConfig c;
  c.model.type = "llama", c.model.width = 4096, c.model.layers = 32, c.model.heads = 32, c.model.kv_heads = 8;
  c.model.mlp_width = 14336, c.model.vocab = 128256, c.model.context = 8192;
  return c;
}

TEST(StageCutOfAModel, TheHeadCountsAsItsOperationsDo) {
  models::TrainConfig c = llama3_8b();
  const double width = 4096, projections = 2 * width * width + 2 * width * 1024, mlp = 3 * width * 14336, attention = 8192 * width;
  const double blocks = 128256 * width / (projections + mlp + attention);
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 0), blocks);
  c.train.recompute = "block";
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 0), blocks * 3 / 4);
  c.train.recompute_blocks = 1;
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 0), blocks);
  c.model.vocab = 0;
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 2 * 128256), 2 * blocks);
  c.sharding.pipeline_head = 0.5;
  EXPECT_EQ(models::head_in_blocks(c, 7), 0.5);
}

// MTP layers count as blocks that may be recomputed, with a head each.
TEST(StageCutOfAModel, WhatPredictsFurtherTokensCountsToo) {
  models::TrainConfig c = llama3_8b();
  const double width = 4096, projections = 2 * width * width + 2 * width * 1024, mlp = 3 * width * 14336, attention = 8192 * width;
  const double block = projections + mlp + attention, head = 128256 * width, joins = 2 * width * width;
  c.model.mtp_layers = 2;
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 0), (3 * head + 2 * (joins + block)) / block);
  c.train.recompute = "block";
  EXPECT_DOUBLE_EQ(models::head_in_blocks(c, 0), 3 * head / block * 3 / 4 + 2 * (joins + block) / block);
}

TEST(StageCutOfAModel, LeavesTheLastStageRoomForTheHead) {
  models::TrainConfig c = llama3_8b();
  c.sharding.pipeline = 4;
  EXPECT_EQ(models::stage_cut(c, 0).to_string(), "8, 9, 9 and 6");
  c.sharding.pipeline_head = 0;
  EXPECT_EQ(models::stage_cut(c, 0).to_string(), "8, 8, 8 and 8");
  c.sharding.pipeline_head = -1, c.sharding.pipeline = 2, c.sharding.pipeline_runs = 2;
  EXPECT_EQ(models::stage_cut(c, 0).to_string(), "8, 9, 9 and 6");
  c.sharding.pipeline = 20;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::stage_cut(c, 0); }),
              HasSubstr("sharding.pipeline 20 with sharding.pipeline_runs 2: the model has 32 blocks"));
}

models::TrainConfig tiny(int64_t stages, double head) {
  models::TrainConfig c = tiny_pipeline(stages, "untied llama", "full_shard");
  c.model.layers = 7;
  c.sharding.pipeline_head = head;
  return c;
}

TEST(StageCutOfAModel, ChangesNoBit) {
  const TrainedRun expected = train_tiny(tiny(1, 0), 1, 3);
  for (const double head : {-1.0, 0.0, 1.0, 2.5, 50.0}) {
    SCOPED_TRACE(head);
    for (const int stages : {2, 3}) expect_same_bits(expected, train_tiny(tiny(stages, head), stages, 3));
  }
}

TEST(StageCutOfAModel, IsTheOneThatTrains) {
  models::TrainConfig c = tiny(2, 3);
  run_local(2, [&](World& w) {
    models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
    EXPECT_EQ(step.cut().to_string(), "5 and 2");
    int64_t own = 0;
    for (const auto& [path, module] : step.model().named_modules())
      own += step.model().is_block(*module) && step.model().stage_of(*module, step.cut()) == w.rank();
    EXPECT_EQ(own, w.rank() == 0 ? 5 : 2);
  }, {.threads_per_rank = 1});
}

// Six blocks and a head as long as two: 4 and 2 rather than 3 and 3.
TEST(StageCutOfAModel, TakesLessTime) {
  if (!kernels::kHasCuda) GTEST_SKIP() << "estimates are of GPUs, for which this build has no kernels";
  models::TrainConfig c = llama3_8b();
  c.model.layers = 6, c.sharding.pipeline = 2, c.sharding.strategy = "zero1";
  c.train.dtype = "bf16", c.train.batch = c.train.micro_batches = 8;
  const Machine h200 = machine_named("h200");
  const double counts = models::time_step(c, 0, 2, h200).seconds;
  c.sharding.pipeline_head = 0;
  const double even = models::time_step(c, 0, 2, h200).seconds;
  EXPECT_NEAR(even / counts, (8 * 5.09 + 3) / (8 * 4.09 + 4), 0.06);
}

}  // namespace
}  // namespace sheaf::testing
