// Pipelines whose stages have several runs of blocks (interleaved 1F1B): the bits of one rank, the bytes of the plan, the communication,
// and how long a step waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 5;

// Nine blocks with dropout in twelve micro-batches.
models::TrainConfig going_round(int64_t stages, int64_t runs, const std::string& type = "untied llama",
                                const std::string& strategy = "full_shard") {
  models::TrainConfig c = tiny_pipeline(stages, type, strategy);
  c.model.layers = 9;
  c.train.batch = 24, c.train.micro_batches = 12;
  c.sharding.pipeline_runs = runs;
  return c;
}

struct Shape2 {
  int stages, runs;
};
constexpr Shape2 kShapes[] = {{2, 2}, {2, 3}, {2, 4}, {3, 2}, {3, 3}, {4, 2}};

TEST(PipelineRuns, HaveTheBitsOfOneRank) {
  for (const char* strategy : {"full_shard", "zero1"}) {
    const TrainedRun expected = train_tiny(going_round(1, 1, "untied llama", strategy), 1, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const auto& [stages, runs] : kShapes) {
      SCOPED_TRACE(str(strategy, " ", stages, " stages of ", runs, " runs"));
      expect_same_bits(expected, train_tiny(going_round(stages, runs, "untied llama", strategy), stages, kSteps));
    }
  }
}

TEST(PipelineRuns, HaveTheBitsOfTheirDataParallelRanks) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "replicate"}) {
    const TrainedRun expected = train_tiny(going_round(1, 1, "untied llama", strategy), 2, kSteps);
    expect_same_bits(expected, train_tiny(going_round(2, 2, "untied llama", strategy), 4, kSteps));
    expect_same_bits(expected, train_tiny(going_round(3, 2, "untied llama", strategy), 6, kSteps));
  }
}

// A tied table has gradients from the first run and from the last.
TEST(PipelineRuns, TrainATiedModelAsOneRankDoes) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* strategy : {"full_shard", "zero1"}) {
      const TrainedRun expected = train_tiny(going_round(1, 1, type, strategy), 1, kSteps);
      for (const auto& [stages, runs] : {Shape2{2, 2}, {3, 3}}) {
        const TrainedRun actual = train_tiny(going_round(stages, runs, type, strategy), stages, kSteps);
        EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << stages;
        for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
      }
    }
}

TEST(PipelineRuns, PrefetchRecomputeAndProgramsChangeNoBit) {
  const TrainedRun expected = train_tiny(going_round(2, 2), 4, kSteps);
  const auto same_with = [&](auto&& change) {
    models::TrainConfig c = going_round(2, 2);
    change(c);
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
  };
  same_with([](auto& c) { c.sharding.prefetch_bytes = 0; });
  same_with([](auto& c) { c.sharding.prefetch_bytes = int64_t{1} << 30; });
  same_with([](auto& c) { c.train.recompute = "block"; });
  same_with([](auto& c) { c.train.recompute = "selective", c.train.recompute_blocks = 2; });
  same_with([](auto& c) { c.train.compile = true; });
  same_with([](auto& c) { c.train.compile = true, c.sharding.memory_budget = int64_t{1} << 40; });
}

// In f64, combined with other axes: replicas, secondary shards, tensor, context and expert axes.
TEST(PipelineRuns, GoWithAllOtherAxes) {
  const auto config = [](int64_t stages, int64_t runs, bool mixture) {
    models::TrainConfig c = going_round(stages, runs);
    c.train.batch = c.train.micro_batches = 4;
    if (mixture) c.model = tiny_mixture();
    else c.model = tiny_model("untied llama", 4, 4);
    c.model.layers = 5;
    return c;
  };
  const Values one = parameters_f64(config(1, 1, false), 1, 2), mixture = parameters_f64(config(1, 1, true), 1, 2);
  const auto expect_same = [&](int world, auto&& change, bool experts = false) {
    models::TrainConfig c = config(2, 2, experts);
    change(c.sharding);
    EXPECT_LE(max_difference(experts ? mixture : one, parameters_f64(c, world, 2)), 1e-9) << world;
  };
  expect_same(4, [](auto& s) { s.replicas = 2; });
  expect_same(8, [](auto& s) { s.replicas = 2; });
  expect_same(8, [](auto& s) { s.replicas = 2, s.secondary = true; });
  expect_same(4, [](auto& s) { s.tensor = 2; });
  expect_same(8, [](auto& s) { s.context = 2, s.tensor = 2, s.strategy = "zero1"; });
  expect_same(4, [](auto& s) { s.experts = 2; }, true);
  expect_same(2, [](auto& s) { s.strategy = "zero1"; }, true);
}

// Every rank's tape is congruent with the others', and takes the bytes of its plan.
TEST(PipelineRuns, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const auto& [stages, runs] : kShapes) {
      const models::TrainConfig c = going_round(stages, runs, strategy == std::string("zero1") ? "gpt2" : "untied llama", strategy);
      SCOPED_TRACE(str(strategy, " ", stages, " ", runs));
      std::mutex mutex;
      std::map<std::string, std::vector<std::vector<std::string>>> calls;  // by communicator, of each of its two ranks
      expect_planned_tapes(c, stages, [&](World&, const Tape& tape) {
        std::map<std::string, std::vector<std::string>> mine;
        for (const PlannedCollective& call : collectives(tape))
          if (call.communicator.find(" to ") != std::string::npos) mine[call.communicator].push_back(call.call);
        std::lock_guard lock(mutex);
        for (auto& [name, list] : mine) calls[name].push_back(std::move(list));
      });
      EXPECT_EQ(calls.size(), 2u * static_cast<size_t>(stages)) << "a link each way between neighbours of the ring";
      for (const auto& [name, lists] : calls) {
        ASSERT_EQ(lists.size(), 2u) << name;
        EXPECT_EQ(lists[0], lists[1]) << name;
      }
    }
  models::TrainConfig c = going_round(2, 2);
  c.train.recompute = "block";
  expect_planned_tapes(c, 4);
  c.train.compile = true;
  expect_planned_tapes(c, 4);
  c = going_round(2, 2);
  c.train.dtype = "bf16";
  c.sharding.tensor = 2;
  expect_planned_tapes(c, 4);
}

TEST(PipelineRuns, GathersAreForeseen) {
  train_tiny(going_round(2, 2), 4, 4, [](models::TrainingStep& step) {
    GatherSchedule& schedule = gather_schedule(step.model());
    const int64_t before = schedule.mispredicted();
    step.run(4, fill_tiny);
    EXPECT_EQ(schedule.mispredicted(), before) << step.world().rank();
    EXPECT_LE(schedule.peak_excess(), schedule.budget());
    EXPECT_GT(schedule.peak_excess(), 0) << "some are gathered ahead";
  });
}

// A unit is reduced along "data" once per micro-batch, whatever the number of runs; the root, which is in no stage, twice: in the first
// part and in the last.
TEST(PipelineRuns, AUnitIsReducedOnceForEachMicroBatch) {
  const models::TrainConfig c = going_round(2, 3);
  for (const int rank : {0, 3}) {
    const models::Plan plan = models::plan_step(c, 13, rank, 4, 1, "local");
    std::map<std::string, int> reduced;
    for (NodeId id = 0; id < plan.tape.num_nodes(); ++id)
      if (const Node& n = plan.tape.node(id); n.phase == Phase::backward && plan.tape.op_name(n) == "reduce_scatter")
        ++reduced[plan.tape.path(n)];
    EXPECT_EQ(reduced.at("blocks.0"), 12);
    EXPECT_EQ(reduced.at("blocks.8"), 12);
    EXPECT_EQ(reduced.at(""), 24) << "its scope is that of the first part and of the last";
  }
}

// A lent buffer is returned where the second send after it is issued, and the rest at the end of all parts: no rank waits for a send in
// between.
TEST(PipelineRuns, SendsComeBackWhereTheSecondOnesAfterThemGo) {
  const models::TrainConfig c = going_round(3, 2);
  const models::Plan plan = models::plan_step(c, 13, 1, 3, 1, "local");
  const std::vector<Turn> turns = one_forward_one_backward(1, 3, 12, 2);
  ASSERT_EQ(plan.turns.size(), turns.size() + 1);
  for (size_t t = 8; t < turns.size(); ++t) {  // from the first backward on
    int sent = 0;
    for (NodeId id = plan.turns[t]; id < plan.turns[t + 1]; ++id) sent += plan.tape.op_name(plan.tape.node(id)) == "sent";
    const bool first = turns[t].kind == Turn::backward && turns[t].micro_batch < 2 && turns[t].run == 1;
    EXPECT_EQ(sent, t + 1 == turns.size() ? 5 : !first) << t;
  }
}

TEST(PipelineRuns, GenerateAndEvaluateAsOneRankDoes) {
  std::vector<int32_t> corpus;
  for (int32_t i = 0; i < 400; ++i) corpus.push_back(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(corpus, 13, "corpus"), 9, 0);
  const auto outcome = [&](int stages, int runs) {
    std::pair<std::vector<int32_t>, double> out;
    train_tiny(going_round(stages, runs), stages, 0, [&](models::TrainingStep& step) {
      magnify(step.model());
      const auto mine = models::generate(step.model(), {1, 2, 3}, 9, 13, {.tokens = 12, .temperature = 0});
      const double loss = step.evaluate(windows);
      if (step.world().rank() == stages - 1) out = {mine, loss};
    });
    return out;
  };
  const auto expected = outcome(1, 1);
  for (const auto& [stages, runs] : kShapes) EXPECT_EQ(outcome(stages, runs), expected) << stages << runs;
}

// Parameters, and so checkpoints, do not depend on the mesh: saved by stages of two runs, a run resumes on others bit for bit.
TEST(PipelineRuns, CheckpointsGoToOtherRuns) {
  const TrainedRun expected = train_tiny(going_round(1, 1), 1, 3);
  EXPECT_EQ(train_tiny(going_round(3, 2), 3, 3).parameters, expected.parameters);
  const ScratchFolder folder;
  train_tiny(going_round(2, 2), 2, 2, [&](models::TrainingStep& step) {
    models::save_checkpoint(folder.path(), 2, step.model(), {&step.optimizer()}, step.world());
  });
  for (const auto& [stages, runs] : {Shape2{1, 1}, {2, 4}, {3, 2}}) {
    Whole whole;
    train_tiny(going_round(stages, runs), stages, 0, [&](models::TrainingStep& step) {
      ASSERT_TRUE(models::load_checkpoint(folder.path(), step.model(), {&step.optimizer()}, step.world()));
      step.run(2, fill_tiny);
      whole.collect(step.model(), false);
    });
    EXPECT_EQ(whole.values(), expected.parameters) << stages << ' ' << runs;
  }
}

TEST(PipelineRuns, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(2, going_round(2, 5)), HasSubstr("sharding.pipeline 2 with sharding.pipeline_runs 5: the model has 9 blocks"));
  EXPECT_THAT(refusal(2, going_round(1, 2)), HasSubstr("sharding.pipeline_runs 2: runs of blocks are those of several stages"));
  models::TrainConfig c = going_round(2, 2);
  c.train.micro_batches = 5;
  EXPECT_THAT(refusal(2, c), HasSubstr("train.micro_batches 5: with sharding.pipeline_runs 2 it is a multiple of sharding.pipeline, 2"));
}

}  // namespace
}  // namespace sheaf::testing
