// Context parallelism by gathering keys and values (ContextComm::all_gather): more ranks than heads, combined with every other axis.
// Gradients in f64; the bits of every strategy on the same mesh; what is communicated and what is kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Values;

constexpr int kSteps = 6;

// Two query heads, which read one key head: fewer than ranks on most of these meshes.
models::ModelConfig model_of(const std::string& type) { return tiny_model(type, 2, type.find("latent") == 0 ? 2 : 1); }

models::TrainConfig gathered(int64_t ranks, const std::string& type, const char* strategy = "full_shard", int64_t tensor = 1) {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type);
  c.sharding.strategy = strategy;
  c.sharding.context = ranks;
  c.sharding.context_comm = "all_gather";
  c.sharding.tensor = tensor;
  return c;
}

// ---- gradients ------------------------------------------------------------------------------------------------------

class GatheredGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, Axes, int>> {};

TEST_P(GatheredGradients, EqualUnshardedInF64) {
  const auto& [type, strategy, axes, rows] = GetParam();
  expect_gradients_of_one_rank(axes, strategy, rows, model_of(type));
}

INSTANTIATE_TEST_SUITE_P(Meshes, GatheredGradients,
                         ::testing::Combine(Values("gpt2", "untied llama", "qwen3", "olmo", "gemma2", "latent"),
                                            Values("full_shard", "shard_grad_op", "zero1", "replicate"),
                                            Values(Axes{{"data", 1}, {"gathered", 2}}, Axes{{"data", 2}, {"gathered", 3}},
                                                   Axes{{"data", 1}, {"gathered", 2}, {"model", 2}}),
                                            Values(7)));
// Ranks with one token, and with none; parameters sharded over the axis itself; all four axes; groups without a row.
INSTANTIATE_TEST_SUITE_P(Uneven, GatheredGradients,
                         ::testing::Combine(Values("gpt2", "llama", "qwen3", "latent without queries"), Values("full_shard", "zero1"),
                                            Values(Axes{{"gathered", 5}}, Axes{{"gathered", 11}}, Axes{{"replica", 2}, {"gathered", 2}},
                                                   Axes{{"secondary", 2}, {"gathered", 3}}, Axes{{"gathered", 3}, {"model", 2}},
                                                   Axes{{"replica", 2}, {"data", 2}, {"gathered", 2}, {"model", 2}}),
                                            Values(3, 1)));

TEST(GatheredContext, DocumentsWindowsExpertsAndStages) {
  const Axes cut{{"data", 1}, {"gathered", 3}}, both{{"gathered", 3}, {"model", 2}};
  for (const char* type : {"gpt2", "qwen3", "latent"})
    for (const Axes& axes : {cut, both})
      for (const int64_t end : {-1, 2}) {
        models::ModelConfig m = model_of(type);
        m.end_of_text = end;
        expect_gradients_of_one_rank(axes, "full_shard", 5, m);
        m.window = 3;
        expect_gradients_of_one_rank(axes, "full_shard", 5, m);
      }
  for (const Axes& axes : {cut, both, Axes{{"data", 1}, {"expert", 2}, {"gathered", 2}}})
    for (const models::ModelConfig& m : {tiny_mixture(), tiny_biased_mixture()}) expect_gradients_of_one_rank(axes, "full_shard", 4, m);
  expect_gradients_of_one_rank(Axes{{"stage", 2, /*chain=*/true}, {"data", 1}, {"gathered", 3}}, "full_shard", 4, model_of("untied llama"));
}

// ---- training -------------------------------------------------------------------------------------------------------

TEST(GatheredContext, StrategiesPrefetchUnitsRecomputeAndProgramsChangeNoBit) {
  for (const char* type : {"gpt2", "untied llama", "latent"})
    for (const int tensor : {1, 2}) {
      const models::TrainConfig usual = gathered(3, type, "full_shard", tensor);
      const TrainedRun expected = train_tiny(usual, 6, kSteps);
      EXPECT_LT(expected.losses.back(), expected.losses.front());
      for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
        if (tensor > 1 && strategy == std::string("replicate")) continue;  // it reduces in another order there
        expect_same_bits(expected, train_tiny(gathered(3, type, strategy, tensor), 6, kSteps));
      }
      const auto with = [&](auto&& change) {
        models::TrainConfig c = usual;
        change(c);
        expect_same_bits(expected, train_tiny(c, 6, kSteps));
      };
      with([](auto& c) { c.sharding.prefetch_bytes = 0; });
      with([](auto& c) { c.sharding.units = "none"; });
      with([](auto& c) { c.train.recompute = "block"; });
      with([](auto& c) { c.train.recompute = "selective"; });
      with([](auto& c) { c.train.compile = true; });
    }
}

TEST(GatheredContext, TrainsAsOneRankDoes) {
  for (const char* type : {"gpt2", "untied llama", "qwen3", "latent"}) {
    models::TrainConfig c = gathered(1, type);
    c.model.dropout = 0.2;
    c.train.micro_batches = 2;
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const auto& [ranks, tensor, world] : {std::tuple{2, 1, 4}, {5, 1, 5}, {2, 2, 4}, {8, 1, 8}}) {
      c.sharding.context = ranks, c.sharding.tensor = tensor;
      const TrainedRun actual = train_tiny(c, world, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << " " << ranks << " " << tensor;
      for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
    }
    c.train.dtype = "bf16";
    c.sharding.context = 3, c.sharding.tensor = 1;
    const TrainedRun rounded = train_tiny(c, 6, kSteps);
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], rounded.losses[s], 0.01) << type;
  }
}

TEST(GatheredContext, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* type : {"llama", "latent"})
    for (const char* strategy : {"full_shard", "zero1"})
      for (const auto& [ranks, tensor, world] : {std::tuple{2, 1, 4}, {5, 1, 5}, {3, 2, 6}}) {
        models::TrainConfig c = gathered(ranks, type, strategy, tensor);
        c.train.micro_batches = 2;
        c.model.end_of_text = 2;
        expect_planned_tapes(c, world);
        c.train.compile = true;
        expect_planned_tapes(c, world);
      }
}

TEST(GatheredContext, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {Axes{{"data", 3}}, Axes{{"gathered", 3}}, Axes{{"data", 2}, {"gathered", 2}}, Axes{{"context", 2}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, tiny_model("llama", 2, 2));
}

// ---- what travels, and what is kept -----------------------------------------------------------------------------------

// Keys and values of other ranks are gathered in the forward and again in the backward, and their gradients are reduce-scattered. Nothing
// else of a block is communicated. Here on rank 0 of two, which has 7 rows and two pieces of about 2 and 3 of their 9 tokens.
TEST(GatheredContext, WhatTravels) {
  for (const char* type : {"gpt2", "untied llama"}) {
    SCOPED_TRACE(type);
    const models::TrainConfig c = gathered(2, type);
    const int64_t layers = c.model.layers, head = 4, kv = 2 * head * (std::string(type) == "gpt2" ? 2 : 1), rows = c.train.batch;
    const int64_t tokens = c.model.context, own = OwnershipMap::from_both_ends(1, tokens, 2).owned_size(0, 2, {1, tokens});
    auto all = traffic(models::plan_step(c, 13, 0, 2, 1, "local").tape);
    EXPECT_EQ(all.count("all_to_all context"), 0u);
    auto parameters = traffic(models::plan_step([&] {
      models::TrainConfig without = c;
      without.sharding.context = 1;
      return without;
    }(), 13, 0, 2, 1, "local").tape);
    // Parameters are also cut over this axis, and communicated as they would be over "data".
    EXPECT_EQ(all["all_gather context"].count, parameters["all_gather data"].count + 2 * layers);
    EXPECT_EQ(all["all_gather context"].bytes,
              parameters["all_gather data"].bytes + 2 * layers * 4 * rows * (tokens - own) * kv);
    EXPECT_EQ(all["reduce_scatter context"].count, parameters["reduce_scatter data"].count + layers);
    EXPECT_EQ(all["reduce_scatter context"].bytes, parameters["reduce_scatter data"].bytes + layers * 4 * rows * own * kv);
  }
}

// Each rank has tokens from both ends: all ranks attend to equally many keys.
TEST(GatheredContext, TokensAreCutFromBothEnds) {
  const models::TrainConfig c = gathered(2, "gpt2");
  const Tape tape = models::plan_step(c, 13, 0, 2, 1, "local").tape;
  const Placement expected = Placement::shard(OwnershipMap::from_both_ends(1, c.model.context, 2));
  bool found = false;
  for (ValueId v = 0; v < tape.num_values() && !found; ++v)
    found = tape.type(v).dtype == kI32 && tape.type(v).layout.num_axes() == 1 && tape.type(v).layout[0] == expected;
  EXPECT_TRUE(found);
}

// The keys and values gathered for a layer are not kept for its backward, nor is anything computed from them: a rank keeps only those of
// its own tokens.
TEST(GatheredContext, WhatIsGatheredIsNotKept) {
  for (const char* type : {"gpt2", "latent"}) {
    models::TrainConfig c = gathered(1, type);
    c.model.context = 900;
    c.sharding.strategy = "replicate";
    const auto of_a_layer = [&](int64_t ranks) {
      const auto peak = [&](int64_t layers) {
        c.model.layers = layers, c.sharding.context = ranks;
        return models::plan_step(c, 13, 0, static_cast<int>(ranks), 1, "local").peak.bytes;
      };
      return peak(9) - peak(8);
    };
    EXPECT_LT(of_a_layer(3), 0.4 * static_cast<double>(of_a_layer(1))) << type;
  }
}

// On ranks with tokens in two intervals, attention's backward has gradients of both at the same time.
TEST(GatheredContext, TheRankThatHoldsMostIsPlanned) {
  models::TrainConfig c = gathered(4, "llama");
  c.model = tiny_model("llama", 4, 4);
  c.model.mlp_width = 8, c.model.context = 4000, c.train.batch = 8;
  const std::vector<int64_t> all = models::plan_peaks(c, 13, 4, 1, "local");
  EXPECT_EQ(std::ranges::max_element(all) - all.begin(), 2);
  EXPECT_THAT(models::ranks_that_hold_most(c, 4), ::testing::Contains(2));
}

// ---- errors ------------------------------------------------------------------------------------------------------

TEST(GatheredContext, UnknownNamesAreRefused) {
  models::TrainConfig c = gathered(2, "gpt2");
  c.sharding.context_comm = "ring";
  EXPECT_THAT([&] { train_tiny(c, 2, 1); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("'all_to_all' or 'all_gather', not 'ring'")));
  c.sharding.context_comm = "all_to_all", c.sharding.context = 3;
  EXPECT_THAT([&] { train_tiny(c, 3, 1); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("all_gather")));
}

}  // namespace
}  // namespace sheaf::testing
