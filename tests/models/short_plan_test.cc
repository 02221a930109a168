// A step's estimate from the shortest sufficient plan, against that from a plan of all turns of all stages.
#include <ctime>

#include <gtest/gtest.h>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/step_time.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

class ShortPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::kHasCuda) GTEST_SKIP() << "estimates are of GPUs, for which this build has no kernels";
  }
};

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = type == "mixture" ? tiny_mixture(1.1) : tiny_model(type, 4, 4);
  c.model.layers = 2;
  c.model.dropout = 0;
  return c;
}

// A short plan equals that of the whole step: its seconds, its peaks, received bytes and waiting times. Links are slow enough for all ranks
// to wait for each other.
void expect_short_plans_are_whole(const models::TrainConfig& c, int world, int ranks_per_host, const std::string& what) {
  Machine machine = machine_named("h200");
  machine.products = {2e9, 8};
  machine.attention_forward = machine.attention_backward = {1e9, 8};
  machine.bytes_per_second = 2e9, machine.f32 = 1;
  machine.within.bytes_per_second = 3e8, machine.between.bytes_per_second = 5e7;
  machine.issue_seconds = machine.least_seconds = 1e-7;
  machine.ranks_per_host = ranks_per_host;
  const models::StepTime whole = models::time_step(c, 48, world, machine, models::Planning::whole);
  const models::StepTime quick = models::time_step(c, 48, world, machine);
  EXPECT_DOUBLE_EQ(quick.seconds, whole.seconds) << what;
  EXPECT_DOUBLE_EQ(quick.computing, whole.computing) << what;
  EXPECT_EQ(quick.peak_bytes, whole.peak_bytes) << what;
  EXPECT_EQ(quick.host_bytes, whole.host_bytes) << what;
  EXPECT_EQ(quick.received, whole.received) << what;
  ASSERT_EQ(quick.waits.size(), whole.waits.size()) << what;
  for (size_t i = 0; i < whole.waits.size(); ++i) {
    EXPECT_EQ(quick.waits[i].first, whole.waits[i].first) << what;
    EXPECT_NEAR(quick.waits[i].second, whole.waits[i].second, 1e-9 * whole.seconds) << what << ' ' << whole.waits[i].first;
  }
  if (c.train.micro_batches % 2 == 0) return;
  EXPECT_EQ(models::peak_of_first_ranks(c, 48, world, machine),
            models::peak_of_first_ranks(c, 48, world, machine, models::Planning::whole)) << what;
}

TEST_F(ShortPlans, AreWholeOnesWithAnyNumberOfMicroBatches) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
      for (const char* recompute : {"none", "selective", "block"})
        for (const int64_t micro_batches : {2, 3, 4, 9}) {
          models::TrainConfig c = config_of(type);
          c.sharding.strategy = strategy, c.train.recompute = recompute;
          c.train.micro_batches = micro_batches, c.train.batch = 2 * micro_batches;
          expect_short_plans_are_whole(c, 2, 8, str(type, ' ', strategy, ' ', recompute, ' ', micro_batches));
        }
}

// Equally many blocks per stage and not; fewer micro-batches than stages, as many, and more.
TEST_F(ShortPlans, AreWholeOnesWithAnyNumberOfStages) {
  for (const int64_t stages : {2, 3, 4, 6})
    for (const int64_t layers : {stages, stages + 1, 2 * stages - 1, 2 * stages + 1})
      for (const int64_t micro_batches : {int64_t{1}, stages - 1, stages, stages + 3, 2 * stages + 3}) {
        // Each strategy, recomputation, dtype, model and kind of links with some of these.
        const auto pick = stages + layers + micro_batches;
        models::TrainConfig c = config_of(pick % 2 ? "gpt2" : "llama");
        c.model.layers = layers;
        c.sharding.pipeline = stages;
        c.sharding.strategy = std::vector{"full_shard", "shard_grad_op", "zero1", "replicate"}[static_cast<size_t>(pick % 4)];
        c.train.recompute = std::vector{"none", "selective", "block"}[static_cast<size_t>(pick % 3)];
        c.train.dtype = pick % 5 < 2 ? "bf16" : "f32";
        c.train.micro_batches = micro_batches, c.train.batch = 2 * micro_batches;
        c.model.tie_embeddings = pick % 7 < 3;
        c.sharding.pipeline_head = static_cast<double>(pick % 4) - 1;
        c.sharding.pipeline_schedule = pick % 3 == 1 ? "1f1b" : "zero_bubble";
        expect_short_plans_are_whole(c, static_cast<int>(2 * stages), pick % 2 ? 4 : 3,
                                     str(stages, " stages ", layers, " blocks ", micro_batches, " micro-batches ", c.sharding.pipeline_schedule));
      }
}

TEST_F(ShortPlans, AreWholeOnesWithWindowsInSomeBlocks) {
  for (const int64_t every : {0, 2, 3}) {
    models::TrainConfig c = config_of("llama");
    c.model.layers = 9;
    c.model.window = 2, c.model.full_attention_every = every;
    c.sharding.pipeline = 3;
    c.train.micro_batches = 5, c.train.batch = 10;
    expect_short_plans_are_whole(c, 6, 4, str("all keys in each block ", every));
  }
}

// Interleaved stages: with many blocks and few, as many rounds as there are kinds of turns, and more.
TEST_F(ShortPlans, AreWholeOnesWithSeveralRuns) {
  for (const auto& [stages, runs, layers] : {std::tuple{2, 2, 21}, {2, 3, 40}, {3, 2, 31}, {4, 2, 37}, {5, 2, 31}, {4, 3, 48}, {4, 2, 9}})
    for (const int64_t rounds : {1, 2, 7}) {
      const auto pick = stages + layers + rounds;
      models::TrainConfig c = config_of(pick % 2 ? "gpt2" : "llama");
      c.model.layers = layers;
      c.sharding.pipeline = stages, c.sharding.pipeline_runs = runs;
      c.sharding.strategy = std::vector{"zero1", "full_shard", "shard_grad_op", "replicate"}[static_cast<size_t>(pick % 4)];
      c.train.recompute = std::vector{"none", "selective", "block"}[static_cast<size_t>(pick % 3)];
      c.train.micro_batches = rounds * stages, c.train.batch = 2 * c.train.micro_batches;
      c.model.tie_embeddings = pick % 7 < 3;
      c.sharding.pipeline_head = static_cast<double>(pick % 4) - 1;
      c.sharding.pipeline_schedule = (runs + rounds) % 2 ? "1f1b" : "zero_bubble";
      expect_short_plans_are_whole(c, 2 * stages, pick % 2 ? 4 : 3,
                                   str(stages, " stages of ", runs, " runs, ", layers, " blocks ", rounds, " rounds ", c.sharding.pipeline_schedule));
    }
}

TEST_F(ShortPlans, AreWholeOnesOnAllAxes) {
  struct Axes {
    int64_t pipeline, tensor, context, experts, replicas;
    bool secondary;
    int world;
  };
  for (const Axes& axes : {Axes{1, 2, 1, 1, 1, false, 4}, {4, 2, 1, 1, 1, false, 16}, {1, 1, 2, 1, 1, false, 4}, {5, 1, 2, 1, 1, false, 10},
                           {1, 2, 2, 1, 1, false, 4}, {1, 1, 1, 2, 1, false, 4}, {4, 1, 1, 2, 1, false, 8}, {1, 1, 1, 1, 2, false, 4},
                           {1, 1, 1, 1, 2, true, 4}, {4, 1, 1, 1, 2, true, 16}, {5, 1, 1, 1, 2, false, 20}, {1, 1, 2, 1, 1, true, 4}})
    for (const char* strategy : {"full_shard", "zero1"})
      for (const int64_t micro_batches : {4, 11}) {
        models::TrainConfig c = config_of(axes.experts > 1 ? "mixture" : "llama");
        c.model.aux_loss = micro_batches == 4 ? 0.1 : 0;
        c.model.layers = axes.pipeline > 1 ? axes.pipeline + 2 : 2;
        auto& s = c.sharding;
        s.pipeline = axes.pipeline, s.tensor = axes.tensor, s.context = axes.context, s.experts = axes.experts;
        s.replicas = axes.replicas, s.secondary = axes.secondary, s.strategy = strategy;
        c.train.micro_batches = micro_batches, c.train.batch = 4 * micro_batches;
        expect_short_plans_are_whole(c, axes.world, 4, str(s.pipeline, s.tensor, s.context, s.experts, s.replicas, s.secondary, ' ',
                                                           strategy, ' ', micro_batches));
      }
}

// Rows of experts that arrive rank by rank, or in groups of experts; tokens that are gathered.
TEST_F(ShortPlans, AreWholeOnesWithExperts) {
  models::ModelConfig many = tiny_mixture();
  many.experts = 16;
  for (const auto& [name, model] : {std::pair("ranks", tiny_gpt_oss()), {"experts", tiny_mixture(1.1)}, {"gathered", many}})
    for (const int world : {2, 4}) {
      models::TrainConfig c = config_of("mixture");
      c.model = model;
      c.sharding.experts = 2, c.sharding.piece_rows = 1;
      c.train.micro_batches = 3, c.train.batch = 12;
      const Tape tape = models::plan_step(c, 48, 0, world, 1, "nccl", Device::cuda()).tape;
      int64_t in_pieces = 0;
      for (NodeId id = 0; id < tape.num_nodes(); ++id) in_pieces += tape.node(id).op == &in_pieces_op();
      EXPECT_EQ(in_pieces > 0, name != std::string("gathered")) << name;
      expect_short_plans_are_whole(c, world, 4, str(name, ' ', world));
    }
}

TEST_F(ShortPlans, AreWholeOnesWithTheHostsMemoryAndOtherOptions) {
  for (const int64_t stages : {1, 4}) {
    models::TrainConfig c = config_of("llama");
    c.sharding.pipeline = stages;
    c.model.layers = stages + 1;
    c.train.micro_batches = 9, c.train.batch = 18;
    const auto expect = [&](const char* what, const models::TrainConfig& with) {
      expect_short_plans_are_whole(with, static_cast<int>(2 * stages), 8, str(what, " in ", stages, " stages"));
    };
    models::TrainConfig x = c;
    x.train.recompute = "block", x.train.offload_activations = true, x.train.offload_optimizer = true;
    expect("offload", x);
    x.train.offload_parameters = true;
    expect("offload all", x);
    x = c, x.train.recompute = "selective", x.train.recompute_blocks = 1;
    expect("some blocks", x);
    x = c, x.sharding.prefetch_bytes = 0;
    expect("no prefetch", x);
    x = c, x.train.dtype = "f16";
    expect("f16", x);
    x = c, x.train.batch = 22;
    expect("unlike micro-batches", x);
    x = c, x.sharding.reduce_dtype = "int8", x.sharding.gather_int8 = true;
    expect("int8", x);
    x = c, x.train.cuda_graph = true, x.model.dropout = 0.1;
    expect("a graph", x);
    x = c, x.model.mtp_layers = 2;
    expect("further tokens", x);
    x.model.tie_embeddings = false;
    expect("further tokens from a head", x);
    if (stages > 1) continue;
    x = c, x.train.optimizer = "muon";
    expect("muon", x);
    x = c, x.train.compile = true;
    expect("a program", x);
    x = c, x.sharding.units = "none";
    expect("one unit", x);
  }
}

TEST_F(ShortPlans, AreShort) {
  models::TrainConfig c = config_of("llama");
  c.sharding.pipeline = 6;
  c.model.layers = 13;
  c.train.micro_batches = 100, c.train.batch = 200;
  // Gathered for each turn; for all turns.
  for (const auto& [strategy, schedule] : {std::pair{"full_shard", "1f1b"}, {"zero1", "1f1b"}, {"zero1", "zero_bubble"}}) {
    c.sharding.strategy = strategy, c.sharding.pipeline_schedule = schedule;
    const auto seconds = [&](models::Planning planning) {
      const std::clock_t begin = std::clock();
      models::time_step(c, 48, 12, machine_named("h200"), planning);
      return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    };
    const double quick = seconds(models::Planning::shorter);
    EXPECT_LT(quick, 0.2 * seconds(models::Planning::whole)) << strategy << ' ' << schedule;
  }
}

}  // namespace
}  // namespace sheaf::testing
