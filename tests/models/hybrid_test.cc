// Hybrid sharding (HSDP): the model is sharded within groups of ranks and replicated over groups. Gradients in f64; in f32 the bits of
// every strategy on the same mesh; the communication along each axis, and its bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

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

models::TrainConfig hybrid(int64_t replicas, const char* strategy = "full_shard") {
  models::TrainConfig c = tiny_config();
  c.sharding.strategy = strategy;
  c.sharding.replicas = replicas;
  return c;
}

struct Groups {
  int replicas, ranks;  // groups, and ranks in each
  friend void PrintTo(const Groups& g, std::ostream* out) { *out << g.replicas << " x " << g.ranks; }
};
class HybridGradients : public ::testing::TestWithParam<std::tuple<const char*, std::string, Groups, int>> {};

TEST_P(HybridGradients, EqualUnshardedInF64) {
  const auto [axis, strategy, groups, rows] = GetParam();
  expect_gradients_of_one_rank(Axes{{axis, groups.replicas}, {"data", groups.ranks}}, strategy, rows);
}

// With 7 rows groups and ranks have different numbers of rows; with 3, some have none.
const auto kMeshes = ::testing::Values(Groups{1, 1}, Groups{1, 3}, Groups{3, 1}, Groups{2, 2}, Groups{2, 3}, Groups{3, 2},
                                       Groups{5, 1});
INSTANTIATE_TEST_SUITE_P(Meshes, HybridGradients,
                         ::testing::Combine(::testing::Values("replica"),
                                            ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate"), kMeshes,
                                            ::testing::Values(7, 3)));
INSTANTIATE_TEST_SUITE_P(SecondaryShards, HybridGradients,
                         ::testing::Combine(::testing::Values("secondary"),
                                            ::testing::Values("full_shard", "shard_grad_op", "zero1"), kMeshes,
                                            ::testing::Values(7, 3)));

TEST(Hybrid, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  const TrainedRun expected = train_tiny(hybrid(2), 4, kSteps);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  for (const char* strategy : {"shard_grad_op", "zero1"})
    expect_same_bits(expected, train_tiny(hybrid(2, strategy), 4, kSteps));
  models::TrainConfig c = hybrid(2);
  c.sharding.prefetch_bytes = 0;
  expect_same_bits(expected, train_tiny(c, 4, kSteps));
  c.sharding.units = "none";
  expect_same_bits(expected, train_tiny(c, 4, kSteps));
  c = hybrid(2);
  c.train.recompute = "block";
  expect_same_bits(expected, train_tiny(c, 4, kSteps));
}

// With one rank per group each rank holds everything: DDP. (One group is full_shard: the same mesh.)
TEST(Hybrid, GroupsOfOneRankAreReplicate) {
  models::TrainConfig c = tiny_config();
  c.sharding.strategy = "replicate";
  for (int world : {2, 3}) expect_same_bits(train_tiny(c, world, kSteps), train_tiny(hybrid(world), world, kSteps));
}

TEST(Hybrid, AccumulationIsCloseToOneRank) {
  models::TrainConfig c = tiny_config();
  c.train.micro_batches = 2;
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  c.sharding.replicas = 2;
  const TrainedRun actual = train_tiny(c, 4, kSteps);
  EXPECT_LE(max_difference(expected.parameters, actual.parameters), 2e-5);
  EXPECT_GT(max_difference(expected.parameters, actual.parameters), 0.0);  // sums in another order
}

// Gathers stay within the group; over groups each rank sums its own slice, which is 1/ranks of the model.
TEST(Hybrid, OnlySlicesOfGradientsTravelBetweenGroups) {
  const models::Plan whole = models::plan_step(hybrid(1), 13, 0, 4, 1, "local");
  const models::Plan groups = models::plan_step(hybrid(2), 13, 0, 8, 1, "local");
  const auto one = traffic(whole.tape);
  auto two = traffic(groups.tape);
  ASSERT_EQ(two.size(), 3u);
  for (const char* name : {"all_gather data", "reduce_scatter data"}) {
    EXPECT_EQ(two[name].count, one.at(name).count) << name;
    EXPECT_EQ(two[name].bytes, one.at(name).bytes) << name;
  }
  EXPECT_EQ(two["all_reduce replica"].count, two["reduce_scatter data"].count);
  // Each of two ranks receives half of its slice and then the other half; small slices are received whole, which is as much.
  EXPECT_EQ(3 * two["all_reduce replica"].bytes, two["reduce_scatter data"].bytes);
}

TEST(Hybrid, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"}) {
    models::TrainConfig c = hybrid(2, strategy);
    c.train.micro_batches = 2;
    expect_planned_tapes(c, 4);
  }
}

TEST(Hybrid, TheSummaryTellsTheAxesApart) {
  const std::string summary = collective_summary(models::plan_step(hybrid(2), 13, 0, 4, 1, "local").tape);
  SCOPED_TRACE(summary);
  EXPECT_THAT(summary, ::testing::ContainsRegex("blocks.0 +all_gather@data +2 "));
  EXPECT_THAT(summary, ::testing::ContainsRegex("blocks.0 +reduce_scatter@data +1 "));
  EXPECT_THAT(summary, ::testing::ContainsRegex("blocks.0 +all_reduce@replica +1 "));
  EXPECT_THAT(summary, ::testing::ContainsRegex("total +@data +[0-9]+ +[0-9.]+ KiB\ntotal +@replica +5 "));
}

// ... once per step, however many micro-batches there are.
TEST(Hybrid, MicroBatchesAreSummedInTheGroupFirst) {
  models::TrainConfig c = hybrid(2);
  c.train.micro_batches = 3;
  auto all = traffic(models::plan_step(c, 13, 0, 4, 1, "local").tape);
  constexpr int64_t kUnits = 4;
  EXPECT_EQ(all["reduce_scatter data"].count, 3 * kUnits);
  EXPECT_EQ(all["all_reduce replica"].count, kUnits);
  c.sharding.strategy = "zero1";
  all = traffic(models::plan_step(c, 13, 0, 4, 1, "local").tape);
  EXPECT_EQ(all["reduce_scatter data"].count, kUnits);
  EXPECT_EQ(all["all_reduce replica"].count, kUnits);
}

// The slice of one unit is summed over the groups while the next unit computes and reduces.
TEST(Hybrid, TheSumOverGroupsIsOneUnitBehind) {
  const Tape tape = models::plan_step(hybrid(2), 13, 0, 4, 1, "local").tape;
  std::vector<std::string> order;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (n.phase != Phase::backward || n.op == nullptr) continue;
    const std::string name(tape.op_name(n));
    if (name == "reduce_scatter" || name == "all_reduce") order.push_back(str(name, " ", path_label(tape.path(n))));
  }
  EXPECT_THAT(order, ::testing::ElementsAre("reduce_scatter blocks.2", "all_reduce blocks.2", "reduce_scatter blocks.1",
                                            "all_reduce blocks.1", "reduce_scatter blocks.0", "all_reduce blocks.0",
                                            "reduce_scatter root", "all_reduce root"));
}

TEST(Hybrid, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  std::vector<Axes> to;
  for (const Groups g : {Groups{2, 2}, Groups{1, 3}, Groups{3, 1}, Groups{1, 1}, Groups{2, 1}})
    to.push_back({{"replica", g.replicas}, {"data", g.ranks}});
  expect_checkpoint_moves(scratch.path(), to[0], to);
}

TEST(Hybrid, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, hybrid(3)), HasSubstr("sharding.replicas 3: 4 ranks cannot be divided"));
  EXPECT_THAT(refusal(1, hybrid(2)), HasSubstr("1 rank cannot"));
  EXPECT_THAT(refusal(4, hybrid(2, "replicate")), HasSubstr("one on each rank already"));
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"replica", 2}, {"data", 2}});
    const auto model = models::make_language_model(tiny_config().model, 13);
    try {
      shard(*model, mesh);
      ADD_FAILURE() << "no error";
    } catch (const ConfigError& e) {
      EXPECT_THAT(e.what(), HasSubstr("leaves out axis 'replica'"));
    }
    EXPECT_THROW(shard(*model, mesh, {.replica_axis = "data"}), ConfigError);
    EXPECT_THROW(shard(*model, mesh, {.replica_axis = "model"}), ConfigError);
    EXPECT_THROW(StrategyChoice("hybrid"), ConfigError);
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
