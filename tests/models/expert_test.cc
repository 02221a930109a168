// Mixtures of experts, and expert parallelism: a mesh axis that cuts experts, and the batch. Gradients in f64; the bits of every strategy
// on the same mesh; dropped choices, against a plain loop; the communication, and its bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;

models::TrainConfig experts(int64_t ranks, const char* strategy = "full_shard", double capacity_factor = 0, int64_t tensor = 1,
                            int64_t context = 1) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_mixture(capacity_factor);
  c.model.capacity_groups = tensor * context == 1 ? 1 : 3;
  c.sharding.strategy = strategy;
  c.sharding.experts = ranks;
  c.sharding.tensor = tensor;
  c.sharding.context = context;
  return c;
}

class ExpertGradients : public ::testing::TestWithParam<std::tuple<Axes, std::string, double, int>> {};

TEST_P(ExpertGradients, EqualUnshardedInF64) {
  const auto& [axes, strategy, capacity, rows] = GetParam();
  expect_gradients_of_one_rank(axes, strategy, rows, tiny_mixture(capacity));
}

std::string mesh_name(const ::testing::TestParamInfo<ExpertGradients::ParamType>& info) {
  const auto& [axes, strategy, capacity, rows] = info.param;
  std::string out = strategy;
  for (const auto& axis : axes) out += str("_", axis.name, axis.size);
  return out + (capacity > 0 ? "_drops_" : "_") + std::to_string(rows);
}

const auto kStrategies = ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate");
INSTANTIATE_TEST_SUITE_P(Meshes, ExpertGradients,
                         ::testing::Combine(::testing::Values(Axes{{"data", 1}, {"expert", 1}}, Axes{{"data", 3}},
                                                              Axes{{"data", 1}, {"expert", 2}}, Axes{{"data", 1}, {"expert", 3}},
                                                              Axes{{"data", 2}, {"expert", 2}}, Axes{{"data", 1}, {"expert", 5}},
                                                              Axes{{"replica", 2}, {"data", 1}, {"expert", 2}}),
                                            kStrategies, ::testing::Values(0.0, 1.1), ::testing::Values(7)), mesh_name);
// Ranks without a row; secondary shards over replicas and over the expert axis; combined with context and tensor axes.
INSTANTIATE_TEST_SUITE_P(Uneven, ExpertGradients,
                         ::testing::Combine(::testing::Values(Axes{{"data", 2}, {"expert", 2}}, Axes{{"data", 1}, {"expert", 5}},
                                                              Axes{{"secondary", 2}, {"data", 1}, {"expert", 2}},
                                                              Axes{{"secondary", 2}, {"data", 2}, {"expert", 2}},
                                                              Axes{{"data", 2}, {"context", 2}}, Axes{{"data", 1}, {"model", 2}},
                                                              Axes{{"data", 1}, {"expert", 2}, {"context", 2}},
                                                              Axes{{"data", 2}, {"expert", 2}, {"context", 2}},
                                                              Axes{{"expert", 2}, {"context", 3}},
                                                              Axes{{"data", 1}, {"expert", 2}, {"model", 2}},
                                                              Axes{{"data", 1}, {"expert", 2}, {"context", 2}, {"model", 2}}),
                                            ::testing::Values("full_shard", "zero1"), ::testing::Values(0.0),
                                            ::testing::Values(3, 1)), mesh_name);

TEST(Experts, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  struct Case { double capacity; int tensor, context, world; };
  for (const auto& [capacity, tensor, context, world] : {Case{0, 1, 1, 2}, Case{1.1, 1, 1, 4}, Case{0, 2, 1, 4}, Case{1.1, 1, 3, 6}}) {
    SCOPED_TRACE(str(capacity, " ", tensor, " ", context, " ", world));
    const auto config = [&](const char* strategy) { return experts(2, strategy, capacity, tensor, context); };
    const TrainedRun expected = train_tiny(config("full_shard"), world, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"})
      expect_same_bits(expected, train_tiny(config(strategy), world, kSteps));
    models::TrainConfig c = config("full_shard");
    c.sharding.prefetch_bytes = 0;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c = config("full_shard");
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c = config("full_shard");
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c.sharding.memory_budget = int64_t{1} << 40;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
  }
}

// Initial values, dropout, dropped choices and the load-balancing loss are those of one rank.
TEST(Experts, TrainsAsOneRankDoes) {
  for (const double capacity : {0.0, 1.1}) {
    models::TrainConfig c = experts(1, "full_shard", capacity);
    c.model.dropout = 0.2;
    c.train.micro_batches = 2;
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const auto& [ranks, world] : {std::pair{1, 3}, {2, 2}, {2, 4}, {5, 5}}) {
      c.sharding.experts = ranks;
      const TrainedRun actual = train_tiny(c, world, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << capacity << " " << ranks << " " << world;
      for (int s = 0; s < kSteps; ++s) {
        EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
        EXPECT_NEAR(expected.norms[s], actual.norms[s], 2e-4 * expected.norms[s]);
      }
    }
  }
}

TEST(Experts, TrainsInBf16) {
  models::TrainConfig c = experts(1);
  c.train.dtype = "bf16";
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  c.sharding.experts = 2;
  const TrainedRun actual = train_tiny(c, 4, kSteps);
  for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 0.02);
}

TEST(Experts, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const auto& [capacity, ranks, tensor, world] : {std::tuple{0.0, 1, 1, 2}, {1.1, 2, 1, 2}, {0.0, 2, 1, 4}, {0.0, 2, 2, 4}}) {
      SCOPED_TRACE(str(strategy, " ", capacity, " ", ranks, " ", tensor, " ", world));
      models::TrainConfig c = experts(ranks, strategy, capacity, tensor);
      c.train.micro_batches = 2;
      expect_planned_tapes(c, world);
    }
  models::TrainConfig c = experts(2);
  c.sharding.secondary = true;
  expect_planned_tapes(c, 4);
  c.train.recompute = "block";
  c.train.dtype = "bf16";
  expect_planned_tapes(c, 4);
  c.train.compile = true;
  expect_planned_tapes(c, 4);
}

TEST(Experts, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"data", 1}, {"expert", 2}}, {{"data", 2}, {"expert", 2}},
                                    {{"data", 1}, {"expert", 5}}, {{"data", 1}, {"expert", 2}, {"context", 2}}, {{"data", 1}, {"model", 2}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, tiny_mixture());
}

// Rows are sent to the ranks of their experts and back, as are their gradients, with a few bytes that say how many are in use. Expert
// weights are never sent along their axis, nor are their gradients summed along it.
TEST(Experts, WhatTravelsAlongWhichAxis) {
  models::TrainConfig c = experts(2);
  c.model.experts_per_token = 2;
  const models::ModelConfig& m = c.model;
  auto moved = traffic(models::plan_step(c, 13, 0, 4, 1, "local").tape);
  EXPECT_EQ(moved["all_to_all expert"].count, 5 * m.layers);
  // The bytes received by rank 0, which has 1 of its pair's 3 sequences and 2 of 5 experts, in one part of 18 rows.
  const int64_t others = 2 * 18, mine = 1 * 18, counts = 2 * 2;
  EXPECT_EQ(moved["all_to_all expert"].bytes, 4 * m.layers * (m.width * 2 * (others + mine) + counts));
  EXPECT_EQ(moved["all_reduce expert"].count, m.layers + 3 + m.layers) << "of units without experts, and of shares of choices";
  EXPECT_EQ(moved["all_reduce data"].count, m.layers) << "shares of choices";
  EXPECT_EQ(moved["reduce_scatter data"].count, 2 * m.layers + 3);
  EXPECT_EQ(moved.size(), 5u);
}

// With three choices per token there would be three times as many rows as tokens: so tokens are gathered, and the experts' outputs and the
// gradients are reduce-scattered. No rows are sent.
TEST(Experts, TokensAreGatheredWhereTheyAreFewer) {
  const models::ModelConfig m = tiny_mixture();
  auto moved = traffic(models::plan_step(experts(2), 13, 0, 4, 1, "local").tape);
  // Rank 0 has 1 of its pair's 3 sequences, of 9 tokens.
  const int64_t others = 2 * 9, mine = 9, rows = 4 * m.width * 2, choices = 3 * 8, weights = 3 * 4;
  EXPECT_EQ(moved["all_gather expert"].count, 4 * m.layers);
  EXPECT_EQ(moved["all_gather expert"].bytes, m.layers * others * (rows + choices + weights));
  EXPECT_EQ(moved["reduce_scatter expert"].count, 3 * m.layers);
  EXPECT_EQ(moved["reduce_scatter expert"].bytes, m.layers * mine * (rows + weights));
  EXPECT_EQ(moved["all_reduce expert"].count, m.layers + 3 + m.layers);
  EXPECT_FALSE(moved.contains("all_to_all expert"));
}

// The memory that a rank needs for experts shrinks with the axis.
TEST(Experts, ARankHoldsItsExperts) {
  models::TrainConfig c = experts(1, "replicate");
  c.model.experts = 8;
  c.model.expert_hidden = 2000;
  const int64_t whole = models::plan_step(c, 13, 0, 4, 1, "local").peak.bytes;
  c.sharding.experts = 4;
  EXPECT_LT(models::plan_step(c, 13, 0, 4, 1, "local").peak.bytes, whole / 2);
}

TEST(Experts, ParametersAreCutOverWhatIsThere) {
  const auto axes = [](int64_t ranks, int world, int64_t replicas = 1, int64_t context = 1, bool secondary = false) {
    models::TrainConfig c = experts(ranks, "full_shard", 0, 1, context);
    c.sharding.replicas = replicas;
    c.sharding.secondary = secondary;
    std::string mesh;
    run_local(world, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::meta());
      if (w.rank() != 0) return;
      mesh = step.mesh().spec->to_string();
      for (const auto& unit : units(step.model()))
        if (unit->name() == "blocks.0" || unit->name() == "blocks.0.moe.experts")
          mesh += " " + unit->buffers()[0].shard.layout().to_string();
    });
    return mesh;
  };
  EXPECT_EQ(axes(1, 2), "(data=2) Shard(flat)@data");
  EXPECT_EQ(axes(2, 2), "(data=1, expert=2) Invariant@data Shard(flat)@expert Shard(1)@data Shard(0)@expert");
  EXPECT_EQ(axes(2, 4), "(data=2, expert=2) Shard(flat)@data Invariant@expert Shard(1)@data Shard(0)@expert");
  EXPECT_EQ(axes(2, 8, 2), "(replica=2, data=2, expert=2) Invariant@replica Shard(flat)@data Invariant@expert "
            "Invariant@replica Shard(1)@data Shard(0)@expert");
  EXPECT_EQ(axes(2, 4, 1, 2), "(expert=2, context=2) Shard(flat)@expert Invariant@context "
            "Shard(0)@expert Shard(1)@context");
  EXPECT_EQ(axes(2, 6, 1, 3), "(expert=2, context=3) Invariant@expert Shard(flat)@context "
            "Shard(0)@expert Shard(1)@context");
  EXPECT_EQ(axes(2, 4, 1, 1, true), "(data=2, expert=2) Shard(0)@data Shard(1)@expert "
            "Shard(1)@data Shard(0)@expert");
}

TEST(Experts, EvaluatesWithoutTheLoadBalancingLoss) {
  std::vector<int32_t> corpus;
  for (int32_t i = 0; i < 100; ++i) corpus.push_back(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(corpus, 13, "corpus"), 9, 0);
  const auto loss = [&](double factor, int64_t ranks, int world) {
    models::TrainConfig c = experts(ranks);
    c.model.aux_loss = factor;
    double out = 0;
    train_tiny(c, world, 0, [&](models::TrainingStep& step) {
      const double mine = step.evaluate(windows);
      if (step.world().rank() == 0) out = mine;
    });
    return out;
  };
  EXPECT_EQ(loss(0, 1, 1), loss(1, 1, 1));
  EXPECT_NEAR(loss(0, 1, 1), loss(1, 2, 4), 2e-5);
}

// Generation drops nothing, whatever the capacity in training.
TEST(Experts, GeneratesAsOneRankDoes) {
  const auto text = [](double capacity, int64_t ranks, int64_t tensor, int world) {
    std::vector<int32_t> out;
    train_tiny(experts(ranks, "full_shard", capacity, tensor), world, 0, [&](models::TrainingStep& step) {
      magnify(step.model());
      const auto mine = models::generate(step.model(), {1, 2, 3}, 9, 13, {.tokens = 12, .temperature = 0});
      if (step.world().rank() == 0) out = mine;
    });
    return out;
  };
  const std::vector<int32_t> expected = text(0, 1, 1, 1);
  EXPECT_GT(std::set<int32_t>(expected.begin(), expected.end()).size(), 4u) << "it says something";
  EXPECT_EQ(text(0.1, 1, 1, 1), expected);
  for (const auto& [ranks, tensor, world] : {std::tuple{2, 1, 4}, {1, 2, 2}, {2, 2, 4}}) EXPECT_EQ(text(0, ranks, tensor, world), expected);
}

models::LlamaConfig llama(double capacity, double aux_loss) {
  models::LlamaConfig c;
  c.experts = 5;
  c.experts_per_token = 3;
  c.capacity_factor = capacity;
  c.aux_loss = aux_loss;
  c.vocab = 13;
  return c;
}

TEST(Experts, WithACacheNothingIsDropped) {
  models::Llama whole(llama(0, 0)), tight(llama(0.1, 0));
  for (models::Llama* m : {&whole, &tight}) materialize(*m, Device::cpu(), {.seed = 3, .dtype = kF64});
  const Tensor tokens = Tensor::from(std::vector<int32_t>{1, 5, 3, 7, 0, 2, 2, 9}, {2, 4});
  const auto next = [&](models::Llama& m) {
    nn::KeyValueCache cache(8);
    return m.next_logits(tokens, cache).to_vector<double>();
  };
  EXPECT_EQ(next(tight), next(whole));
  EXPECT_NE(tight.logits(tokens).to_vector<double>(), whole.logits(tokens).to_vector<double>());
}

// Whatever the loss is divided by, the load-balancing loss is divided alike: a micro-batch has the share of its targets.
TEST(Experts, TheLoadBalancingLossIsDividedAsTheLossIs) {
  models::Llama m(llama(0, 1.0)), without(llama(0, 0));
  for (models::Llama* model : {&m, &without}) materialize(*model, Device::cpu(), {.seed = 3, .dtype = kF64});
  const Tensor tokens = Tensor::from(std::vector<int32_t>{1, 5, 3, 7, 0, 2, 2, 9}, {2, 4});
  const auto loss = [&](models::Llama& model, const CrossEntropyOptions& options) {
    return model.loss(tokens, tokens, options).item<double>();
  };
  const double once = loss(m, {}) - loss(without, {});
  EXPECT_GT(once, 1.5);  // two mixtures, each about even
  EXPECT_NEAR(loss(m, {.divide_by = 8}) - loss(without, {.divide_by = 8}), once, 1e-12);
  EXPECT_NEAR(loss(m, {.divide_by = 32}) - loss(without, {.divide_by = 32}), once / 4, 1e-12);
  const Tensor divisor = full({}, 32, kF64);
  EXPECT_NEAR(loss(m, {.divisor = divisor}) - loss(without, {.divisor = divisor}), once / 4, 1e-12);
  // If only some tokens are targets, divide_by counts them for the cross-entropy, while the auxiliary losses use the number of tokens.
  const CrossEntropyOptions both{.divide_by = 16, .divisor = divisor};
  EXPECT_NEAR(loss(m, both) - loss(without, both), once / 2, 1e-12);
  EXPECT_NEAR(loss(without, both), loss(without, {.divide_by = 32}), 1e-12);
}

// Added to the training loss with its own factor, and to no other loss.
TEST(Experts, TheRoutersZLoss) {
  models::LlamaConfig c = llama(0, 0);
  c.router_z_loss = 0.25;
  models::Llama m(c), without(llama(0, 0));
  for (models::Llama* model : {&m, &without}) materialize(*model, Device::cpu(), {.seed = 3, .dtype = kF64});
  const Tensor tokens = Tensor::from(std::vector<int32_t>{1, 5, 3, 7, 0, 2, 2, 9}, {2, 4});
  const double added = m.loss(tokens, tokens).item<double>() - without.loss(tokens, tokens).item<double>();
  double sum = 0;
  m.logits(tokens);
  for (models::LlamaBlock& block : m.blocks) sum += block.moe->router_z.item<double>();
  EXPECT_GT(sum, 1.0);
  EXPECT_NEAR(added, 0.25 * sum, 1e-12);
  m.eval();
  EXPECT_EQ(m.loss(tokens, tokens).item<double>(), without.loss(tokens, tokens).item<double>());
}

// The load-balancing loss moves tokens to experts that had few.
TEST(Experts, TheLoadEvensOut) {
  const auto imbalance = [](double factor) {
    models::TrainConfig c = experts(2);
    c.model.aux_loss = factor;
    c.train.steps = 60;
    c.train.lr = 1e-2;
    double out = 0;
    train_tiny(c, 2, 60, [&](models::TrainingStep& step) {
      auto& llama = dynamic_cast<models::Llama&>(step.model());
      llama.train();
      for (models::LlamaBlock& block : llama.blocks) block.moe->config.balances = true;
      const TinyBatch batch = tiny_batch(step.mesh(), 0, 7);
      llama.logits(batch.tokens);
      double sum = 0;
      for (models::LlamaBlock& block : llama.blocks)
        sum += redistribute(block.moe->imbalance, Layout(step.mesh().spec, Placement::invariant())).item<double>();
      if (step.world().rank() == 0) out = sum / static_cast<double>(llama.blocks.size());
    });
    return out;
  };
  const double without = imbalance(0), with = imbalance(1);
  EXPECT_LT(with, 1.02);
  EXPECT_GT(without - 1, 2 * (with - 1)) << without << " " << with;
}

TEST(Experts, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, experts(3)), HasSubstr("sharding.experts 3: 4 ranks cannot be divided into groups of so many"));
  EXPECT_THAT(refusal(6, experts(6)), HasSubstr("'blocks.0.moe.experts': the 6 ranks of expert axis 'expert' cannot share 5 experts; "
                                                "at most 5 can"));
  models::TrainConfig c = experts(2);
  c.model.experts = 0;
  EXPECT_THAT(refusal(4, c), HasSubstr("sharding.experts 2: the model has no mixtures of experts (model.experts)"));
  c = experts(2);
  c.model.experts_per_token = 6;
  EXPECT_THAT(refusal(4, c), HasSubstr("6 choices among 5 experts"));
  c = experts(2);
  c.model.type = "gpt2";
  EXPECT_THAT(refusal(4, c), HasSubstr("only model.type llama has mixtures of experts"));
  c = experts(1, "full_shard", 1.1, 1, 2);
  EXPECT_THAT(refusal(2, c), HasSubstr("'blocks.0.moe': places for the tokens of a sequence are counted in 3 groups, and the 2 ranks "
                                       "of 'context' share its 9: with a capacity"));
  c = experts(1, "full_shard", 1.1, 2, 2);
  EXPECT_THAT(refusal(4, c), HasSubstr("the 4 ranks of 'context' and 'model' share its 9"));
  c = experts(2);
  c.sharding.secondary = true;
  EXPECT_THAT(refusal(2, c), HasSubstr("sharding.secondary needs several groups of ranks"));
  c = experts(2, "full_shard", 0, 2, 2);
  c.sharding.replicas = 2;
  EXPECT_THAT(refusal(32, c), HasSubstr("at most 4 axes: stages, replicas, data, experts, context and tensor are 5"));
}

}  // namespace
}  // namespace sheaf::testing
