// The guarantees of distributed training, with Muon: those of parity_test.cc and hybrid_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 10;

models::TrainConfig muon(const char* strategy = "full_shard", int64_t replicas = 1) {
  models::TrainConfig c = tiny_config();
  c.train.optimizer = "muon";
  c.train.lr = 0.02;
  c.sharding.strategy = strategy;
  c.sharding.replicas = replicas;
  return c;
}

TEST(MuonTraining, LearnsAndIsNotAdamW) {
  const TrainedRun run = train_tiny(muon(), 2, kSteps);
  EXPECT_LT(run.losses.back(), run.losses.front() - 0.1f);
  models::TrainConfig c = muon();
  c.train.momentum = 0.9;
  EXPECT_NE(train_tiny(c, 2, kSteps).losses, run.losses);
  c.train.optimizer = "adamw";
  EXPECT_NE(train_tiny(c, 2, kSteps).losses, run.losses);
}

TEST(MuonTraining, AllStrategiesAgreeAtOneWorldSize) {
  for (int world : {1, 2, 3}) {
    const TrainedRun expected = train_tiny(muon(), world, kSteps);
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      expect_same_bits(expected, train_tiny(muon(strategy), world, kSteps));
    }
    models::TrainConfig c = muon();
    c.sharding.prefetch_bytes = 0;
    c.sharding.units = "none";
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
  }
}

TEST(MuonTraining, RanksEqualMicroBatchesInRankOrder) {
  for (const char* type : {"gpt2", "llama"})
    for (int world : {2, 3, 6}) {
      SCOPED_TRACE(str(type, " at ", world));
      models::TrainConfig c = muon();
      c.model.type = type;
      c.train.batch = 6;
      const TrainedRun ranks = train_tiny(c, world, kSteps);
      c.train.micro_batches = world;
      expect_same_bits(ranks, train_tiny(c, 1, kSteps));
    }
}

TEST(MuonTraining, ReplicasAgreeInAllStrategies) {
  const TrainedRun expected = train_tiny(muon("full_shard", 2), 4, kSteps);
  for (const char* strategy : {"shard_grad_op", "zero1"}) expect_same_bits(expected, train_tiny(muon(strategy, 2), 4, kSteps));
  expect_same_bits(train_tiny(muon("replicate"), 2, kSteps), train_tiny(muon("full_shard", 2), 2, kSteps));
}

// Groups share the masters and state that each would have: no bit changes.
TEST(MuonTraining, BitsOfSecondaryShardsAreThoseOfWholeReplicas) {
  for (const int64_t groups : {2, 4})
    for (const char* dtype : {"f32", "bf16"}) {
      models::TrainConfig c = muon("full_shard", groups);
      c.train.dtype = dtype;
      const TrainedRun expected = train_tiny(c, 4, kSteps);
      c.sharding.secondary = true;
      for (const char* strategy : {"full_shard", "zero1"}) {
        c.sharding.strategy = strategy;
        expect_same_bits(expected, train_tiny(c, 4, kSteps));
      }
    }
}

TEST(MuonTraining, StrategiesAgreeBesideATensorAxis) {
  for (const char* type : {"gpt2", "llama"}) {
    models::TrainConfig c = muon();
    c.model.type = type;
    c.sharding.tensor = 2;
    const TrainedRun expected = train_tiny(c, 4, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front() - 0.1f);
    for (const char* strategy : {"shard_grad_op", "zero1"}) {
      c.sharding.strategy = strategy;
      expect_same_bits(expected, train_tiny(c, 4, kSteps));
    }
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
  }
}

TEST(MuonTraining, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    models::TrainConfig c = muon(strategy);
    c.train.micro_batches = 2;
    for (int world : {1, 3}) expect_planned_tapes(c, world);
    c.train.dtype = "bf16";
    expect_planned_tapes(c, 3);
    c.sharding.replicas = 2;
    if (strategy != std::string("replicate")) expect_planned_tapes(c, 4);
    c.sharding.secondary = strategy != std::string("replicate");
    if (c.sharding.secondary) expect_planned_tapes(c, 4);
    c.sharding.replicas = 1, c.sharding.secondary = false;
    c.sharding.tensor = 2;
    expect_planned_tapes(c, 4);
    c.sharding.tensor = 1, c.sharding.pipeline = 2;
    expect_planned_tapes(c, 2);
    expect_planned_tapes(c, 4);
  }
}

// Every matrix is sent to its owner and back: a rank receives at most about twice its share of the model.
TEST(MuonTraining, MatricesTravelOnceEachWay) {
  const models::TrainConfig c = muon();
  constexpr int kWorld = 4;
  int64_t bytes = 0, calls = 0, parameters = 0;
  for (int rank = 0; rank < kWorld; ++rank) {
    const models::Plan plan = models::plan_step(c, 13, rank, kWorld, 1, "local");
    parameters = plan.parameters;
    for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
      const Node& n = plan.tape.node(id);
      for (const Transfer& t : transfers(plan.tape, n)) {
        if (t.name != "all_to_all") continue;
        ++calls;
        bytes += plan.tape.wire_bytes(n);
      }
    }
  }
  EXPECT_EQ(calls, kWorld * 2 * c.model.layers);
  EXPECT_LT(bytes, 2 * 4 * parameters);
  EXPECT_GT(bytes, 2 * 4 * parameters / 2);
}

TEST(MuonTraining, HalfOfTheStateOfMatricesIsGone) {
  const auto peak = [](const char* optimizer) {
    models::TrainConfig c = muon();
    c.train.optimizer = optimizer;
    int64_t state = 0;
    run_local(2, [&](World& w) {
      models::TrainingStep step(c, c.model.vocab, w, Device::meta());
      for (const optim::ShardState& s : step.optimizer().shards())
        for (const Tensor& t : s.state)
          if (w.rank() == 0) state += t.numel();
    }, {.threads_per_rank = 1});
    return state;
  };
  EXPECT_LT(peak("muon"), peak("adamw") * 6 / 10);
}

// Each stage orthogonalises its own matrices, whatever other axes divide them. In f32 batches of other sizes add up in another order.
TEST(MuonTraining, StagesHaveTheNumbersOfOneRank) {
  const auto config = [](int64_t stages, int64_t runs, const char* strategy) {
    models::TrainConfig c = tiny_pipeline(stages, "untied llama", strategy);
    c.train.optimizer = "muon", c.train.lr = 0.02;
    c.model = tiny_model("untied llama", 4, 4), c.model.layers = 5;
    c.sharding.pipeline_runs = runs;
    return c;
  };
  const Values expected = parameters_f64(config(1, 1, "replicate"), 1, 3);
  const auto expect_same = [&](int world, int64_t stages, int64_t runs, const char* strategy, auto&& change) {
    models::TrainConfig c = config(stages, runs, strategy);
    change(c.sharding);
    EXPECT_LE(max_difference(expected, parameters_f64(c, world, 3)), 1e-9) << world << ' ' << stages << ' ' << strategy;
  };
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    for (const int stages : {2, 3, 5}) expect_same(stages, stages, 1, strategy, [](auto&) {});
    expect_same(4, 2, 1, strategy, [](auto&) {});
    expect_same(6, 2, 2, strategy, [](auto&) {});
  }
  expect_same(8, 2, 1, "full_shard", [](auto& s) { s.replicas = 2; });
  expect_same(8, 2, 1, "zero1", [](auto& s) { s.replicas = 2, s.secondary = true; });
  expect_same(4, 2, 1, "full_shard", [](auto& s) { s.tensor = 2; });
  expect_same(6, 3, 1, "full_shard", [](auto& s) { s.tensor = 2; });
  expect_same(8, 2, 2, "zero1", [](auto& s) { s.context = 2, s.tensor = 2; });
}

// A stage's matrices are only sent within the stage, and a rank orthogonalises none of another stage.
TEST(MuonTraining, StagesKeepTheirMatrices) {
  models::TrainConfig c = tiny_pipeline(2);
  c.train.optimizer = "muon";
  for (const int rank : {0, 3}) {
    const models::Plan plan = models::plan_step(c, 13, rank, 4, 1, "local");
    int own = 0, others = 0;
    run_local(4, [&](World& w) {
      w.mesh({{"stage", 2, true}, {"data", 2}});
      if (w.rank() != rank) return;
      for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
        const Node& n = plan.tape.node(id);
        for (const Transfer& t : transfers(plan.tape, n)) own += n.phase == Phase::update && t.name == "all_to_all" && t.axis == 1;
        if (plan.tape.op_name(n) == "stack") others += plan.tape.type(plan.tape.output(n)).layout.is_elsewhere();
      }
    });
    EXPECT_EQ(own, 2 * (rank == 0 ? 3 : 2)) << "there and back, of each block";
    EXPECT_GT(others, 0);
  }
}

// One step in f64 has the numbers of one rank, and so has one more step after it.
TEST(MuonTraining, CheckpointsMoveBetweenMeshes) {
  const std::vector<Axes> meshes = {
      {{"data", 1}}, {{"data", 3}}, {{"data", 5}}, {{"replica", 3}, {"data", 1}}, {{"data", 2}, {"model", 2}},
      {{"data", 1}, {"model", 3}}, {{"data", 2}, {"model", 3}}, {{"replica", 2}, {"data", 1}, {"model", 2}},
      {{"secondary", 2}, {"data", 2}}, {{"secondary", 3}, {"data", 1}}, {{"secondary", 2}, {"data", 1}, {"model", 3}},
      {{"data", 2}, {"context", 2}}, {{"stage", 2, true}, {"data", 2}}};
  for (const char* type : {"gpt2", "llama"})
    for (const Axes& from : {Axes{{"replica", 2}, {"data", 2}}, Axes{{"secondary", 2}, {"data", 1}, {"model", 2}}}) {
      const ScratchFolder scratch;
      expect_checkpoint_moves(scratch.path(), from, meshes, tiny_model(type, 6, 3), true);
    }
}

TEST(MuonTraining, ASavedRunGoesOnBitForBit) {
  for (const char* dtype : {"f32", "bf16"}) {
    const ScratchFolder scratch;
    models::TrainConfig c = muon();
    c.train.dtype = dtype;
    run_local(3, [&](World& w) {
      models::TrainingStep run(c, c.model.vocab, w, Device::cpu()), resumed(c, c.model.vocab, w, Device::cpu());
      for (int s = 0; s < 3; ++s) run.run(s, fill_tiny);
      models::save_checkpoint(scratch.path(), 3, run.model(), {&run.optimizer()}, w);
      ASSERT_TRUE(models::load_checkpoint(scratch.path(), resumed.model(), {&resumed.optimizer()}, w));
      for (int s = 3; s < 6; ++s) EXPECT_EQ(run.run(s, fill_tiny).loss.item(), resumed.run(s, fill_tiny).loss.item());
      EXPECT_EQ(shards(run.model()), shards(resumed.model()));
    }, {.threads_per_rank = 1});
  }
}

TEST(MuonTraining, WhatCannotBeIsRefused) {
  models::TrainConfig c = muon();
  c.train.optimizer = "lion";
  EXPECT_THAT(refusal(1, c), HasSubstr("train.optimizer is lion, not adamw or muon"));
}

}  // namespace
}  // namespace sheaf::testing
