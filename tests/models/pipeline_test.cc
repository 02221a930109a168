// Pipeline parallelism: a mesh axis whose ranks have successive blocks. Gradients in f64; the bits of one rank, whatever the stages and
// their schedule; the communication between neighbours, and the bytes of each stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kSteps = 6;

constexpr bool kChain = true;

class PipelineGradients : public ::testing::TestWithParam<std::tuple<Axes, std::string, std::string, int>> {};

TEST_P(PipelineGradients, EqualUnshardedInF64) {
  const auto& [axes, strategy, type, rows] = GetParam();
  models::ModelConfig m = type == "mixture" ? tiny_mixture() : tiny_model(type, 4, 4);
  m.layers = 5;
  expect_gradients_of_one_rank(axes, strategy, rows, m);
}

std::string mesh_name(const ::testing::TestParamInfo<PipelineGradients::ParamType>& info) {
  const auto& [axes, strategy, type, rows] = info.param;
  std::string out = strategy + "_" + type;
  std::ranges::replace(out, ' ', '_');
  for (const auto& axis : axes) out += str("_", axis.name, axis.size);
  return out + "_" + std::to_string(rows);
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, PipelineGradients,
    ::testing::Combine(::testing::Values(Axes{{"stage", 1, kChain}, {"data", 2}}, Axes{{"stage", 2, kChain}, {"data", 1}},
                                         Axes{{"stage", 3, kChain}, {"data", 1}}, Axes{{"stage", 4, kChain}, {"data", 1}},
                                         Axes{{"stage", 5, kChain}, {"data", 1}}, Axes{{"stage", 2, kChain}, {"data", 2}},
                                         Axes{{"stage", 2, kChain}, {"data", 3}}, Axes{{"data", 2}, {"stage", 2, kChain}}),
                       ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate"),
                       ::testing::Values("gpt2", "llama", "untied llama", "gemma2"), ::testing::Values(7)),
    mesh_name);
INSTANTIATE_TEST_SUITE_P(
    BesideOtherAxes, PipelineGradients,
    ::testing::Combine(::testing::Values(Axes{{"stage", 2, kChain}, {"replica", 2}, {"data", 2}},
                                         Axes{{"stage", 2, kChain}, {"secondary", 2}, {"data", 2}},
                                         Axes{{"stage", 3, kChain}, {"data", 1}, {"model", 2}},
                                         Axes{{"stage", 2, kChain}, {"data", 2}, {"context", 2}},
                                         Axes{{"stage", 2, kChain}, {"data", 1}, {"context", 2}, {"model", 2}}),
                       ::testing::Values("full_shard", "zero1"), ::testing::Values("gpt2", "untied llama"), ::testing::Values(3)),
    mesh_name);
INSTANTIATE_TEST_SUITE_P(
    Mixtures, PipelineGradients,
    ::testing::Combine(::testing::Values(Axes{{"stage", 3, kChain}, {"data", 1}}, Axes{{"stage", 2, kChain}, {"data", 2}},
                                         Axes{{"stage", 2, kChain}, {"data", 1}, {"expert", 2}}),
                       ::testing::Values("full_shard", "zero1"), ::testing::Values("mixture"), ::testing::Values(7)),
    mesh_name);

// Every parameter of an untied model is on one stage, except the last norm, to which only one stage contributes.
TEST(Pipeline, HasTheBitsOfOneRank) {
  for (const char* strategy : {"full_shard", "zero1"}) {
    const TrainedRun expected = train_tiny(tiny_pipeline(1, "untied llama", strategy), 1, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (int count : {2, 3, 4, 5}) {
      SCOPED_TRACE(str(strategy, " ", count));
      expect_same_bits(expected, train_tiny(tiny_pipeline(count, "untied llama", strategy), count, kSteps));
    }
  }
}

// A tied table has gradients from two stages, which are added in another order.
TEST(Pipeline, TrainsATiedModelAsOneRankDoes) {
  for (const char* type : {"gpt2", "llama"}) {
    const TrainedRun expected = train_tiny(tiny_pipeline(1, type), 1, kSteps);
    for (int count : {2, 5}) {
      const TrainedRun actual = train_tiny(tiny_pipeline(count, type), count, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << count;
      for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
    }
  }
}

TEST(Pipeline, HasTheBitsOfItsDataParallelRanks) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "replicate"}) {
    const TrainedRun expected = train_tiny(tiny_pipeline(1, "untied llama", strategy), 2, kSteps);
    expect_same_bits(expected, train_tiny(tiny_pipeline(2, "untied llama", strategy), 4, kSteps));
    expect_same_bits(expected, train_tiny(tiny_pipeline(3, "untied llama", strategy), 6, kSteps));
  }
}

TEST(Pipeline, PrefetchRecomputeAndProgramsChangeNoBit) {
  const TrainedRun expected = train_tiny(tiny_pipeline(2), 4, kSteps);
  const auto same_with = [&](auto&& change) {
    models::TrainConfig c = tiny_pipeline(2);
    change(c);
    expect_same_bits(expected, train_tiny(c, 4, kSteps));
  };
  same_with([](auto& c) { c.sharding.prefetch_bytes = 0; });
  same_with([](auto& c) { c.sharding.prefetch_bytes = int64_t{1} << 30; });
  same_with([](auto& c) { c.train.recompute = "block"; });
  same_with([](auto& c) { c.train.recompute = "block", c.train.recompute_blocks = 3; });
  same_with([](auto& c) { c.train.compile = true; });
  same_with([](auto& c) { c.train.compile = true, c.train.recompute = "block"; });
  same_with([](auto& c) { c.train.compile = true, c.sharding.memory_budget = int64_t{1} << 40; });
}

// Fewer micro-batches than stages, and many more.
TEST(Pipeline, AnyNumberOfMicroBatchesWillDo) {
  for (int64_t micro_batches : {1, 2, 7}) {
    const auto config = [&](int64_t count) {
      models::TrainConfig c = tiny_pipeline(count);
      c.train.micro_batches = micro_batches;
      return c;
    };
    expect_same_bits(train_tiny(config(1), 1, kSteps), train_tiny(config(3), 3, kSteps));
  }
}

// Except for parameters that all stages have, whose gradients from the stages are rounded before they are added.
TEST(Pipeline, HasTheBitsOfOneRankInBf16) {
  models::TrainConfig c = tiny_pipeline(1);
  c.train.dtype = "bf16";
  c.train.clip = 0;  // which would make each parameter depend on all
  TrainedRun expected = train_tiny(c, 1, 1);
  const TrainedRun many = train_tiny(c, 1, kSteps);
  c.sharding.pipeline = 3;
  TrainedRun actual = train_tiny(c, 3, 1);
  EXPECT_EQ(actual.parameters.extract("norm.weight").mapped().size(), expected.parameters.extract("norm.weight").mapped().size());
  EXPECT_EQ(max_difference(expected.parameters, actual.parameters), 0.0);
  EXPECT_EQ(expected.parameters.size(), 37u);
  EXPECT_EQ(expected.losses, actual.losses);
  actual = train_tiny(c, 3, kSteps);
  for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(many.losses[s], actual.losses[s], 1e-3);
}

// The calls that each rank issues on a communicator, by a name that is unique to the communicator's ranks.
class Calls {
 public:
  void add(World& world, const Tape& tape, const Axes& axes) {
    const Mesh mesh = world.mesh(axes);
    std::map<std::string, std::vector<std::string>> mine;
    for (const PlannedCollective& c : collectives(tape)) {
      std::string at;
      for (const auto& axis : axes)
        if (c.communicator.find(" " + axis.name + " ") == std::string::npos) at += str(" ", axis.name, "=", mesh.coordinate(axis.name));
      mine[c.communicator + at].push_back(c.call);
    }
    std::lock_guard lock(mutex_);
    for (const auto& [name, calls] : mine) {
      const auto [it, first] = calls_.emplace(name, calls);
      EXPECT_EQ(it->second, calls) << name;
      ++ranks_[name];
    }
  }
  std::map<std::string, int> ranks_;

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::string>> calls_;
};

TEST(Pipeline, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const auto& [count, world] : {std::pair{2, 2}, {3, 3}, {2, 4}, {5, 5}})
      for (const char* type : {"gpt2", "untied llama"}) {
        SCOPED_TRACE(str(strategy, " ", count, " ", world, " ", type));
        Calls calls;
        expect_planned_tapes(tiny_pipeline(count, type, strategy), world, [&, count = count, world = world](World& w, const Tape& tape) {
          calls.add(w, tape, {{"stage", count, kChain}, {"data", world / count}});
        });
        for (const auto& [name, ranks] : calls.ranks_)
          EXPECT_EQ(ranks, name.find(" to ") != std::string::npos ? 2 : name.find(" stage ") != std::string::npos ? count : world / count)
              << name;
      }
  models::TrainConfig c = tiny_pipeline(2);
  c.train.recompute = "block";
  expect_planned_tapes(c, 4);
  c.train.compile = true;
  expect_planned_tapes(c, 4);
  c = tiny_pipeline(2);
  c.train.dtype = "bf16";
  c.sharding.tensor = 2;
  expect_planned_tapes(c, 4);
}

TEST(Pipeline, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"stage", 2, kChain}, {"data", 1}}, {{"stage", 3, kChain}, {"data", 2}},
                                    {{"stage", 5, kChain}, {"data", 1}}, {{"data", 1}, {"model", 2}}};
  models::ModelConfig m = tiny_model("untied llama", 4, 2);
  m.layers = 5;
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, m);
}

TEST(Pipeline, GeneratesAndEvaluatesAsOneRankDoes) {
  std::vector<int32_t> corpus;
  for (int32_t i = 0; i < 200; ++i) corpus.push_back(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(corpus, 13, "corpus"), 9, 0);
  const auto outcome = [&](int count, int world) {
    std::pair<std::vector<int32_t>, double> out;
    train_tiny(tiny_pipeline(count), world, 0, [&](models::TrainingStep& step) {
      magnify(step.model());
      const auto mine = models::generate(step.model(), {1, 2, 3}, 9, 13, {.tokens = 12, .temperature = 0});
      const double loss = step.evaluate(windows);
      if (step.world().rank() == world - 1) out = {mine, loss};
    });
    return out;
  };
  const auto expected = outcome(1, 1);
  EXPECT_GT(std::set<int32_t>(expected.first.begin(), expected.first.end()).size(), 4u) << "it says something";
  for (int count : {2, 3, 5}) EXPECT_EQ(outcome(count, count), expected) << count;
}

// Per micro-batch, neighbours exchange one tensor forward and its gradient backward; nothing else is sent along the axis except the last
// norm's gradient, the norm of all gradients and the loss.
TEST(Pipeline, WhatTravels) {
  models::TrainConfig c = tiny_pipeline(3);
  c.train.batch = 8;
  const int64_t bytes = 2 * c.model.context * c.model.width * 4;  // of a micro-batch of two rows
  for (int rank : {0, 1, 2}) {
    auto moved = std::map<std::string, Traffic>();
    const auto plan = models::plan_step(c, 13, rank, 3, 1, "local");
    run_local(3, [&](World& w) {
      w.mesh({{"stage", 3, kChain}, {"data", 1}});
      if (w.rank() == rank) moved = traffic(plan.tape);
    });
    const int64_t neighbours = rank == 1 ? 2 : 1;
    EXPECT_EQ(moved["send stage"].count, 2 * 4 * neighbours) << rank;
    EXPECT_EQ(moved["send stage"].bytes, 4 * neighbours * bytes) << rank;
    EXPECT_EQ(moved.size(), 1u) << rank;
    int sums = 0;
    for (NodeId id = 0; id < plan.tape.num_nodes(); ++id)
      if (const Node& n = plan.tape.node(id); plan.tape.op_name(n) == "all_reduce") {
        EXPECT_EQ(n.phase, Phase::update) << "no stage waits for all others before it has done its own";
        sums += plan.tape.type(plan.tape.inputs(n)[0]).shape.numel() > 1;
      }
    EXPECT_EQ(sums, 2) << rank << ": the last norm's gradient, and the squares of all";
    int64_t given_back = 0;  // before the update, so that it does not hold activations as well
    for (NodeId id = 0; id < plan.tape.num_nodes() && plan.tape.node(id).phase != Phase::update; ++id)
      given_back += plan.tape.op_name(plan.tape.node(id)) == "sent";
    EXPECT_EQ(given_back, 4 * neighbours) << rank;
  }
}

// A stage holds its blocks' parameters, and activations of as many micro-batches as there are stages from it on.
TEST(Pipeline, AStageHoldsItsBlocks) {
  models::TrainConfig c = tiny_pipeline(1, "untied llama", "replicate");
  c.model.layers = 4;
  c.model.width = 64, c.model.head_dim = 32;
  c.train.batch = 64, c.train.micro_batches = 16;
  const int64_t whole = models::plan_peaks(c, 13, 1, 1, "local")[0];
  c.sharding.pipeline = 4;
  const std::vector<int64_t> peaks = models::plan_peaks(c, 13, 4, 1, "local");
  for (const int64_t peak : peaks) EXPECT_LT(peak, whole / 2);
  EXPECT_GT(peaks[1], peaks[2]) << "activations of three micro-batches, and of two";
}

// A pass in a stage's step differs from the previous pass, but matches that of the previous step.
TEST(Pipeline, GathersAreForeseen) {
  models::TrainConfig c = tiny_pipeline(2);
  c.model.layers = 8;
  for (const int64_t micro_batches : {1, 4}) {
    c.train.micro_batches = micro_batches;
    train_tiny(c, 4, 4, [](models::TrainingStep& step) {
      GatherSchedule& schedule = gather_schedule(step.model());
      const int64_t before = schedule.mispredicted();
      step.run(4, fill_tiny);
      EXPECT_EQ(schedule.mispredicted(), before) << step.world().rank();
      EXPECT_LE(schedule.peak_excess(), schedule.budget());
      EXPECT_GT(schedule.peak_excess(), 0) << "some are gathered ahead";
    });
  }
}

TEST(Pipeline, EachStageRecomputesItsFirstBlocks) {
  models::TrainConfig c = tiny_pipeline(2);
  c.train.recompute = "block";
  c.train.recompute_blocks = 1;
  std::set<std::string> repeated;
  const models::Plan plan = models::plan_step(c, 13, 0, 2, 1, "local");
  for (NodeId id = 0; id < plan.tape.num_nodes(); ++id)
    if (const Node& n = plan.tape.node(id); n.flags & Node::kRecomputed) {
      const std::string& path = plan.tape.path(n);
      repeated.insert(path.substr(0, path.find('.', 7)));
    }
  EXPECT_THAT(repeated, ElementsAre("blocks.0", "blocks.3"));
}

// Of three stages also the middle one.
TEST(Pipeline, EveryStageFitsIntoABudget) {
  models::TrainConfig c = tiny_pipeline(3);
  c.model.layers = 9;
  c.model.width = 32, c.model.head_dim = 16, c.model.mlp_width = 400;
  c.train.batch = 24, c.train.micro_batches = 6;
  c.train.recompute = "block";
  const auto most = [](const std::vector<int64_t>& peaks) { return std::ranges::max(peaks); };
  c.train.recompute_blocks = 3;
  const int64_t least = most(models::plan_peaks(c, 13, 3, 1, "local"));
  c.train.recompute_blocks = 0;
  const int64_t whole = most(models::plan_peaks(c, 13, 3, 1, "local"));
  ASSERT_LT(least, whole);
  c.train.recompute = "fit";
  for (int64_t budget = least; budget < whole; budget += (whole - least) / 5) {
    c.sharding.memory_budget = budget;
    EXPECT_LE(most(models::plan_peaks(c, 13, 3, 1, "local")), budget);
  }
}

TEST(Pipeline, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, tiny_pipeline(3)), HasSubstr("sharding.pipeline 3: 4 ranks cannot be divided into groups of so many"));
  EXPECT_THAT(refusal(6, tiny_pipeline(6)), HasSubstr("sharding.pipeline 6: the model has 5 blocks"));
  models::TrainConfig c = tiny_pipeline(2);
  c.sharding.units = "none";
  EXPECT_THAT(refusal(2, c), HasSubstr("sharding.units none: the stages of sharding.pipeline 2 are of blocks"));
}

}  // namespace
}  // namespace sheaf::testing
