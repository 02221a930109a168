// Secondary shards: replicas in which each rank's masters, gradients and optimizer state are a slice of its group's. The bits of whole
// replicas; how often a group gathers its copy, and its memory. Gradients in f64 are in hybrid_test.cc, except those with a tensor axis.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;
constexpr int64_t kUnits = 4;

models::TrainConfig replicas(int64_t groups, const char* strategy = "full_shard", bool secondary = true) {
  models::TrainConfig c = tiny_config();
  c.sharding.strategy = strategy;
  c.sharding.replicas = groups;
  c.sharding.secondary = secondary;
  return c;
}

TEST(Secondary, BesideATensorAxisInF64) {
  for (const char* strategy : {"full_shard", "zero1"})
    for (const Axes& axes : {Axes{{"secondary", 2}, {"data", 2}, {"model", 2}}, Axes{{"secondary", 3}, {"data", 1}, {"model", 2}}}) {
      SCOPED_TRACE(strategy);
      expect_gradients_of_one_rank(axes, strategy, 7);
    }
}

// Sums have the same addends in the same order: cutting the masters changes no bit.
TEST(Secondary, BitsAreThoseOfWholeReplicas) {
  for (const int64_t groups : {2, 4}) {
    const TrainedRun expected = train_tiny(replicas(groups, "full_shard", false), 4, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"})
      expect_same_bits(expected, train_tiny(replicas(groups, strategy), 4, kSteps));
    models::TrainConfig c = replicas(groups);
    c.sharding.prefetch_bytes = 0;
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
    c = replicas(groups);
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
  }
}

TEST(Secondary, BitsOfBf16AndMicroBatchesAreThoseOfWholeReplicas) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"})
    for (const int64_t groups : {2, 4}) {
      models::TrainConfig c = replicas(groups, strategy, false);
      c.train.micro_batches = 3;
      c.train.dtype = "bf16";
      const TrainedRun expected = train_tiny(c, 4, 4);
      c.sharding.secondary = true;
      expect_same_bits(expected, train_tiny(c, 4, 4));
    }
}

// Ranks that share sequences hold as much as each group of the other ranks.
TEST(Secondary, CopiesOfRanksThatShareSequences) {
  models::TrainConfig c = replicas(1, "full_shard", false);
  c.sharding.context = 2;
  const TrainedRun expected = train_tiny(c, 4, kSteps);
  c.sharding.secondary = true;
  expect_same_bits(expected, train_tiny(c, 4, kSteps));
  expect_planned_tapes(c, 4);
  auto cut = traffic(models::plan_step(c, 13, 0, 4, 1, "local").tape);
  EXPECT_EQ(cut["reduce_scatter context"].count, kUnits);
}

// A group gathers its copy once per step, however many micro-batches there are; over groups the gradients that whole replicas would
// all-reduce are reduce-scattered, and the copy is gathered.
TEST(Secondary, CopiesAreGatheredOnceAStep) {
  for (const int64_t micro_batches : {1, 3}) {
    models::TrainConfig c = replicas(2, "full_shard", false);
    c.train.micro_batches = micro_batches;
    auto whole = traffic(models::plan_step(c, 13, 0, 8, 1, "local").tape);
    c.sharding.secondary = true;
    auto cut = traffic(models::plan_step(c, 13, 0, 8, 1, "local").tape);
    EXPECT_EQ(cut["all_gather secondary"].count, 0);
    ASSERT_EQ(cut.size(), 4u + 1u);
    EXPECT_EQ(cut["all_gather replica"].count, kUnits);
    EXPECT_EQ(cut["reduce_scatter replica"].count, kUnits);
    for (const char* name : {"all_gather data", "reduce_scatter data"}) EXPECT_EQ(cut[name].count, whole[name].count) << name;
    EXPECT_EQ(cut["all_gather replica"].bytes, cut["reduce_scatter replica"].bytes);  // two groups: half a slice each
  }
}

TEST(Secondary, CopiesArePrefetchedAndGoneAtTheEnd) {
  const Tape tape = models::plan_step(replicas(2), 13, 0, 4, 1, "local").tape;
  int copies = 0, ahead = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    for (const Transfer& t : transfers(tape, tape.node(id)))
      if (t.name == "all_gather" && tape.type(t.to).layout.mesh()->name(t.axis) == "replica") {
        ++copies;
        ahead += (tape.node(id).flags & Node::kPrefetched) != 0;
      }
  EXPECT_EQ(copies, kUnits);
  EXPECT_EQ(ahead, kUnits - 1);  // nothing precedes the first
}

TEST(Secondary, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"})
    for (const char* dtype : {"f32", "bf16"}) {
      models::TrainConfig c = replicas(2, strategy);
      c.train.micro_batches = 2;
      c.train.dtype = dtype;
      expect_planned_tapes(c, 4);
      c.sharding.replicas = 4;  // of one rank
      expect_planned_tapes(c, 4);
      c.sharding.replicas = 2;
      c.sharding.tensor = 2;
      expect_planned_tapes(c, 4);
    }
}

// The masters, state and gradients of whole replicas, 16 bytes per parameter, are cut over groups.
TEST(Secondary, TakesLessMemory) {
  models::TrainConfig c = replicas(8, "full_shard", false);
  c.model.width = 128;
  c.model.layers = 12;
  const int64_t whole = models::plan_step(c, 13, 0, 8, 1, "local").peak.bytes;
  c.sharding.secondary = true;
  const models::Plan plan = models::plan_step(c, 13, 0, 8, 1, "local");
  // Masters, two moments and the gradient are an eighth, but the copy is added.
  EXPECT_NEAR(static_cast<double>(whole - plan.peak.bytes), static_cast<double>(plan.parameters) * 4 * (4 * 7.0 / 8 - 1),
              0.1 * static_cast<double>(whole));
}

TEST(Secondary, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  std::vector<Axes> to = {{{"secondary", 2}, {"data", 2}}, {{"replica", 2}, {"data", 2}}, {{"secondary", 3}, {"data", 1}},
                          {{"data", 1}}, {{"secondary", 2}, {"data", 1}, {"model", 2}}};
  expect_checkpoint_moves(scratch.path(), to[0], to);
}

// Evaluation gathers outside recordings; a training step after it reuses none of that.
TEST(Secondary, StepsAndPassesWithoutARecordingTakeTurns) {
  std::vector<int32_t> ids(200);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(ids, 13, "squares"), tiny_config().model.context);
  const auto run = [&](bool secondary, std::vector<double>& losses) {
    run_local(4, [&](World& w) {
      models::TrainingStep step(replicas(2, "full_shard", secondary), 13, w, {});
      Allocator& memory = *RankContext::current().memory(Device::cpu());
      int64_t peak = 0;
      for (int s = 0; s < 4; ++s) {
        memory.reset_peak();
        step.run(s, fill_tiny).loss.item();
        if (s == 2) peak = memory.stats().peak;
        if (s == 3) {
          EXPECT_EQ(memory.stats().peak, peak);
        }
        if (s < 2) continue;
        const double loss = step.evaluate(windows);
        if (w.rank() == 0) losses.push_back(loss);
      }
    }, {.threads_per_rank = 1});
  };
  std::vector<double> whole, cut;
  run(false, whole);
  run(true, cut);
  EXPECT_EQ(whole, cut);
}

// The prefetched parameter of a late block may still be read after the last backward, in its recording.
TEST(Secondary, AValueMayBeReadAfterTheLastBackward) {
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"secondary", 2}, {"data", 2}});
    const auto model = tiny_model_f64(mesh, {});
    const auto parameters = model->parameters();
    const auto late = std::ranges::find_if(parameters, [](const nn::Parameter& p) { return p.name() == "blocks.2.mlp.up.weight"; });
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    for (int step = 0; step < 3; ++step) {
      Recording recording({.step = step});
      recording.backward(model->loss(batch.tokens, batch.targets, {.divide_by = 32}), {.last_micro_batch = true});
      const std::vector<double> seen = late->value().to_vector<double>();
      for (const Finding& f : check_gathers(recording.take())) ADD_FAILURE() << f.message;
      EXPECT_EQ(seen, full_parameter(*late).to_vector<double>());
    }
  }, {.threads_per_rank = 1});
}

// They belong to a forward that no recording knows: the next step uses none of them, and no plan includes them.
TEST(Secondary, CopiesOfAnEvaluationGoWhereAStepBegins) {
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"secondary", 4}, {"data", 1}});
    const auto model = tiny_model_f64(mesh, {});
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    const Allocator& memory = *RankContext::current().memory(Device::cpu());
    const int64_t before = memory.stats().live;
    for (int evaluations = 0; evaluations < 2; ++evaluations) model->loss(batch.tokens, batch.targets);
    EXPECT_GT(memory.stats().live, before) << "the next batch that is evaluated need not gather them again";
    Recording recording;
    GatherSchedule& schedule = gather_schedule(*model);
    schedule.enter_scope();
    EXPECT_EQ(memory.stats().live, before);
    schedule.leave_scope();
  }, {.threads_per_rank = 1});
}

TEST(Secondary, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, replicas(1)), HasSubstr("sharding.secondary needs several groups of ranks"));
  models::TrainConfig c = replicas(1);
  c.sharding.context = 2;
  EXPECT_THAT(refusal(2, c), HasSubstr("a sharding.context that is not what the parameters are cut over"));  // which cuts them
  EXPECT_THAT(refusal(4, replicas(2, "replicate")), HasSubstr("one on each rank already"));
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"replica", 2}, {"data", 2}});
    const auto refuse = [&](const ShardOptions& options, const char* why) {
      const auto model = models::make_language_model(tiny_config().model, 13);
      try {
        shard(*model, mesh, options);
        ADD_FAILURE() << "no error";
      } catch (const ConfigError& e) {
        EXPECT_THAT(e.what(), HasSubstr(why));
      }
    };
    refuse({.secondary = true}, "neither ShardOptions::replica_axis nor");
    refuse({.replica_axis = "replica", .secondary = true, .strategy = Strategy::replicate}, "not 'replicate'");
    EXPECT_THROW(StrategyChoice("secondary_shard"), ConfigError);
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
