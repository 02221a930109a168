// Context parallelism: a mesh axis that cuts sequences, or attention's heads instead, combined with replicas, sharding and a tensor axis.
// Gradients in f64; the bits of every strategy on the same mesh; the communication along each axis, and its bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;

// Ten heads for GPT-2, and ten that read five key heads for Llama, so that ranks of every axis share heads unevenly, as they do the 9
// tokens of a sequence.
models::ModelConfig model_of(const std::string& type) { return tiny_model(type, 10, 5); }

models::TrainConfig context(int64_t ranks, const char* strategy = "full_shard", const std::string& type = "gpt2", int64_t tensor = 1) {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type);
  c.sharding.strategy = strategy;
  c.sharding.context = ranks;
  c.sharding.tensor = tensor;
  return c;
}

using Sizes = MeshSizes;

class ContextGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, Sizes, int>> {};

TEST_P(ContextGradients, EqualUnshardedInF64) {
  const auto [type, strategy, sizes, rows] = GetParam();
  expect_gradients_of_one_rank(sizes.axes(), strategy, rows, model_of(type));
}

const auto kStrategies = ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate");
INSTANTIATE_TEST_SUITE_P(Meshes, ContextGradients,
                         ::testing::Combine(::testing::Values("gpt2", "llama", "untied llama", "qwen3", "olmo", "gemma2"), kStrategies,
                                            ::testing::Values(Sizes{0, 1, 1, 0}, Sizes{0, 1, 2, 0}, Sizes{0, 1, 3, 0},
                                                              Sizes{0, 2, 2, 0}, Sizes{0, 1, 2, 2}),
                                            ::testing::Values(7)));
// One head and one or two tokens per rank; parameters sharded over the axis itself; groups of which some have no row; combined with a
// tensor axis over which two ranks share five key heads; all four axes.
INSTANTIATE_TEST_SUITE_P(Uneven, ContextGradients,
                         ::testing::Combine(::testing::Values("gpt2", "llama", "qwen3", "olmo"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(Sizes{0, 1, 5, 0}, Sizes{0, 0, 3, 0}, Sizes{2, 0, 2, 0},
                                                              Sizes{0, 0, 2, 2}, Sizes{2, 1, 2, 2}, Sizes{0, 2, 2, 2}),
                                            ::testing::Values(3, 1)));
// More ranks than key heads, some of which are replicated: the same number of copies of each, and not; combined with a tensor axis that
// cuts them.
INSTANTIATE_TEST_SUITE_P(Copies, ContextGradients,
                         ::testing::Combine(::testing::Values("llama", "untied llama", "qwen3", "olmo"), ::testing::Values("full_shard", "replicate"),
                                            ::testing::Values(Sizes{0, 0, 6, 0}, Sizes{0, 0, 10, 0}, Sizes{0, 2, 7, 0},
                                                              Sizes{0, 0, 3, 2}, Sizes{2, 0, 4, 2}),
                                            ::testing::Values(3)));
// More ranks than tokens.
INSTANTIATE_TEST_SUITE_P(Many, ContextGradients,
                         ::testing::Combine(::testing::Values("gpt2"), ::testing::Values("full_shard"),
                                            ::testing::Values(Sizes{0, 0, 10, 0}, Sizes{0, 0, 5, 2}), ::testing::Values(2)));

// After the tensor axis in the mesh, it works against tensor regions, but results are right.
TEST(Context, StandsInAnyOrder) {
  for (const char* type : {"gpt2", "llama"}) {
    const Values expected = gradients_f64(Axes{{"data", 1}}, "replicate", 3, {}, model_of(type));
    for (const Axes& axes : {Axes{{"data", 1}, {"model", 2}, {"context", 2}}, Axes{{"model", 2}, {"context", 2}, {"data", 2}},
                             Axes{{"context", 3}, {"data", 2}}})
      EXPECT_LE(max_difference(expected, gradients_f64(axes, "full_shard", 3, {}, model_of(type))), 1e-12 * max_magnitude(expected));
  }
}

TEST(Context, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  for (const char* type : {"gpt2", "untied llama"})
    for (const int tensor : {1, 2}) {
      const TrainedRun expected = train_tiny(context(2, "full_shard", type, tensor), 4 * tensor, kSteps);
      EXPECT_LT(expected.losses.back(), expected.losses.front());
      for (const char* strategy : {"shard_grad_op", "zero1", "replicate"})
        expect_same_bits(expected, train_tiny(context(2, strategy, type, tensor), 4 * tensor, kSteps));
      models::TrainConfig c = context(2, "full_shard", type, tensor);
      c.sharding.prefetch_bytes = 0;
      expect_same_bits(expected, train_tiny(c, 4 * tensor, kSteps));
      c.sharding.units = "none";
      expect_same_bits(expected, train_tiny(c, 4 * tensor, kSteps));
      c = context(2, "full_shard", type, tensor);
      c.train.recompute = "block";
      expect_same_bits(expected, train_tiny(c, 4 * tensor, kSteps));
    }
}

// Random draws do not depend on how sequences are cut: neither initial values nor dropout masks.
TEST(Context, TrainsAsOneRankDoes) {
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    models::TrainConfig c = context(1, "full_shard", type);
    c.model.dropout = 0.2;
    c.train.micro_batches = 2;
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const auto& [ranks, tensor, world] : {std::tuple{2, 1, 4}, {5, 1, 5}, {2, 2, 4}, {8, 1, 8}, {4, 2, 8}}) {
      c.sharding.context = ranks;
      c.sharding.tensor = tensor;
      const TrainedRun actual = train_tiny(c, world, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << " " << ranks << " " << tensor;
      for (int s = 0; s < kSteps; ++s) {
        EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
        EXPECT_NEAR(expected.norms[s], actual.norms[s], 2e-4 * expected.norms[s]);
      }
    }
  }
}

TEST(Context, TrainsInBf16) {
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    models::TrainConfig c = context(1, "full_shard", type);
    c.train.dtype = "bf16";
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    c.sharding.context = 3;
    const TrainedRun actual = train_tiny(c, 6, kSteps);
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 0.01);
  }
}

TEST(Context, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const int tensor : {1, 2}) {
      models::TrainConfig c = context(2, strategy, "llama", tensor);
      c.train.micro_batches = 2;
      expect_planned_tapes(c, 4);
      c.sharding.context = 4;
      expect_planned_tapes(c, 4 * tensor);
      c.sharding.context = 6 / tensor;
      expect_planned_tapes(c, 6);
    }
}

TEST(Context, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {Axes{{"data", 3}}, Sizes{0, 2, 2, 0}.axes(), Sizes{0, 0, 3, 0}.axes(),
                                    Sizes{0, 0, 2, 2}.axes(), Sizes{2, 1, 2, 0}.axes()};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, model_of("llama"));
}

// For rank 0, which has 3 rows of the batch, 4 of their 9 tokens and, of a block's projections, the columns of two of five groups of heads.
//
// Attention's operands are exchanged into whole sequences and its result back, as are their gradients; nothing else in a block is
// communicated along the axis. Parameters are communicated as without the axis, and each rank's share of their gradients is summed along
// it.
TEST(Context, WhatTravelsAlongWhichAxis) {
  const int64_t layers = context(1).model.layers, width = context(1).model.width, head = width / 10;
  constexpr int64_t kRows = 3, kMine = 4, kOthers = 5, kSize = 4;
  for (const char* type : {"gpt2", "llama", "untied llama"}) {
    SCOPED_TRACE(type);
    const bool gpt = std::string(type) == "gpt2";
    auto whole = traffic(models::plan_step(context(1, "full_shard", type), 13, 0, 2, 1, "local").tape);
    auto cut = traffic(models::plan_step(context(2, "full_shard", type), 13, 0, 4, 1, "local").tape);
    const int64_t queries = gpt ? 5 : 4, keys = gpt ? 5 : 2, all_keys = gpt ? 10 : 5;
    const int64_t in = (queries + 2 * keys) * head, other_in = (10 + 2 * all_keys) * head - in, out = queries * head,
                  other_out = width - out;
    EXPECT_EQ(cut["all_to_all context"].count, 4 * layers);
    EXPECT_EQ(cut["all_to_all context"].bytes,
              kSize * kRows * layers * (kOthers * in + kMine * other_out + kOthers * out + kMine * other_in));
    EXPECT_EQ(cut["all_reduce context"].count, layers + (std::string(type) == "untied llama" ? 3 : 1));  // units
    EXPECT_EQ(cut["all_reduce context"].bytes, cut["reduce_scatter data"].bytes);
    for (const char* name : {"all_gather data", "reduce_scatter data"}) {
      EXPECT_EQ(cut[name].count, whole[name].count) << name;
      EXPECT_EQ(cut[name].bytes, whole[name].bytes) << name;
    }
    EXPECT_EQ(cut.size(), 4u);
  }
}

// With more ranks than key heads, each rank has one copy of a key head, and sends the other ranks theirs: each of 10 ranks has one query
// head, half of those that read its key head. Here rank 0, which has 7 rows and none of their 9 tokens.
TEST(Context, WhatTravelsWithCopies) {
  const int64_t layers = context(1).model.layers, head = 4;
  constexpr int64_t kRows = 7, kTokens = 9, kSize = 4;
  const Tape& tape = models::plan_step(context(10, "full_shard", "llama"), 13, 0, 10, 1, "local").tape;
  auto all = traffic(tape);
  // Forward: all tokens of one query, one key and one value head are received. Backward: those of its output's gradient.
  EXPECT_EQ(all["all_to_all context"].count, 4 * layers);
  EXPECT_EQ(all["all_to_all context"].bytes, kSize * kRows * kTokens * layers * (3 + 1) * head);
  int repeats = 0, sums = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    repeats += tape.op_name(tape.node(id)) == std::string("repeat_key_heads");
    sums += tape.op_name(tape.node(id)) == std::string("sum_key_heads");
  }
  EXPECT_EQ(repeats, layers);
  EXPECT_EQ(sums, layers);
  // With one head for each rank there are no copies.
  const Tape& of_five = models::plan_step(context(5, "full_shard", "llama"), 13, 0, 5, 1, "local").tape;
  for (NodeId id = 0; id < of_five.num_nodes(); ++id) EXPECT_NE(of_five.op_name(of_five.node(id)), std::string("repeat_key_heads"));
}

// Each axis communicates what it does without the other: tokens gathered by tensor regions, heads shared by ranks of the context axis.
TEST(Context, AndATensorAxisKeepOutOfEachOthersWay) {
  const int64_t layers = context(1).model.layers;
  auto all = traffic(models::plan_step(context(2, "full_shard", "untied llama", 2), 13, 0, 8, 1, "local").tape);
  EXPECT_EQ(all["all_to_all context"].count, 4 * layers);
  EXPECT_EQ(all["all_gather model"].count, 6 * layers + 3 + 3);
  EXPECT_EQ(all["reduce_scatter model"].count, 4 * layers + 2 + 1);
  EXPECT_EQ(all["all_reduce model"].count, layers + 1);
  EXPECT_EQ(all["all_reduce context"].count, 2 * layers + 3) << "of a block what the tensor axis cuts, and what it does not; tables and the norm";
  EXPECT_EQ(all.size(), 7u);
}

// Attention's backward keeps the queries, keys and values that attention read, not the buffers that were sent.
TEST(Context, OneFormOfQueriesKeysAndValuesIsKept) {
  for (const char* type : {"gpt2", "llama"}) {
    const models::Plan plan = models::plan_step(context(2, "full_shard", type), 13, 0, 2, 1, "local");
    const Tape& tape = plan.tape;
    std::vector<ValueId> sent;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      const auto all = transfers(tape, n);
      if (n.phase == Phase::forward && !all.empty() && all[0].name == "all_to_all" &&
          tape.type(all[0].to).layout[0].map().is_parts())
        sent.push_back(tape.inputs(n)[0]);
    }
    EXPECT_EQ(sent.size(), 2u);
    for (NodeId id = 0; id < tape.num_nodes(); ++id)
      for (const ValueId v : tape.inputs(tape.node(id)))
        EXPECT_FALSE(tape.node(id).phase == Phase::backward && std::ranges::count(sent, v)) << tape.op_name(tape.node(id));
  }
}

// If more ranks share a sequence than there are data-parallel ranks, the parameters are cut over the context axis.
TEST(Context, ParametersAreCutOverTheLargerAxis) {
  const auto axes = [](int64_t ranks, int world, int64_t replicas = 1, int64_t tensor = 1) {
    models::TrainConfig c = context(ranks, "full_shard", "gpt2", tensor);
    c.sharding.replicas = replicas;
    std::string mesh;
    run_local(world, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::meta());
      const auto unit = units(step.model()).at(0);
      if (w.rank() == 0) mesh = str(step.mesh().spec->to_string(), " by ", step.mesh().spec->name(unit->axis()));
    });
    return mesh;
  };
  EXPECT_EQ(axes(1, 4), "(data=4) by data");
  EXPECT_EQ(axes(2, 4), "(data=2, context=2) by data");
  EXPECT_EQ(axes(4, 4), "(context=4) by context");
  EXPECT_EQ(axes(3, 6), "(replica=2, context=3) by context");
  EXPECT_EQ(axes(2, 8, 2, 2), "(replica=2, context=2, model=2) by context");
  EXPECT_EQ(axes(2, 16, 2, 2), "(replica=2, data=2, context=2, model=2) by data");
}

// The memory that a rank needs for a step shrinks with the axis: activations everywhere.
TEST(Context, ARankHoldsItsTokens) {
  models::TrainConfig c = context(1);
  c.model.layers = 8;
  c.model.context = 900;
  c.sharding.strategy = "replicate";
  const int64_t whole = models::plan_step(c, 13, 0, 1, 1, "local").peak.bytes;
  c.sharding.context = 3;
  EXPECT_LT(models::plan_step(c, 13, 0, 3, 1, "local").peak.bytes, whole / 2);
}

TEST(Context, EvaluatesAndGeneratesAsOneRankDoes) {
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    const auto run = [&](int64_t ranks, int64_t tensor, int world) {
      std::vector<int32_t> corpus;
      for (int32_t i = 0; i < 100; ++i) corpus.push_back(i * i % 13);
      const models::SequentialWindows windows(models::Tokens::from_ids(corpus, 13, "corpus"), 9, 0);
      std::pair<double, std::vector<int32_t>> out;
      models::TrainConfig c = context(ranks, "full_shard", type, tensor);
      train_tiny(c, world, 4, [&](models::TrainingStep& step) {
        const double loss = step.evaluate(windows);
        magnify(step.model());
        const auto text = models::generate(step.model(), {1, 2, 3}, 9, 13, {.tokens = 12, .temperature = 0});
        if (step.world().rank() == 0) out = {loss, text};
      });
      return out;
    };
    const auto [loss, text] = run(1, 1, 1);
    const size_t few = type == std::string("gpt2") ? 1 : 4;  // its table is its head, too: it likes to repeat
    EXPECT_GT(std::set<int32_t>(text.begin(), text.end()).size(), few) << type;
    for (const auto& [ranks, tensor, world] : {std::tuple{2, 1, 4}, {3, 1, 3}, {2, 2, 4}, {6, 1, 6}, {3, 2, 6}}) {
      const auto [other_loss, other_text] = run(ranks, tensor, world);
      EXPECT_NEAR(other_loss, loss, 2e-5);
      EXPECT_EQ(other_text, text);
    }
  }
}

TEST(Context, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, context(3)), HasSubstr("sharding.context 3: 4 ranks cannot be divided into groups of so many"));
  EXPECT_THAT(refusal(4, context(4, "full_shard", "gpt2", 2)),
              HasSubstr("sharding.context 4: 2 ranks cannot be divided into groups of so many; all 4 are for sharding.replicas times "
                        "sharding.context times sharding.tensor"));
  EXPECT_THAT(refusal(11, context(11)),
              HasSubstr("'blocks.0.attention': the 11 ranks of context axis 'context' cannot share 10 heads; at most 10 can"));
  EXPECT_THAT(refusal(11, context(11, "full_shard", "llama")),
              HasSubstr("'blocks.0.attention': the 11 ranks of context axis 'context' cannot share 10 heads that read 5 key heads; at "
                        "most 10 can"));
  EXPECT_THAT(refusal(10, context(5, "full_shard", "llama", 2)),
              HasSubstr("the 5 ranks of context axis 'context' cannot share 10 heads that read 5 key heads, of which a rank of axis "
                        "'model' has as few as 4; at most 4 can"));
  EXPECT_THAT(refusal(12, context(2, "full_shard", "llama", 6)),  // halves of key heads, of which some ranks have one
              HasSubstr("the 2 ranks of context axis 'context' cannot share 10 heads, of which a rank of axis 'model' has as few as 1"));
  EXPECT_THAT(refusal(22, context(2, "full_shard", "llama", 11)), HasSubstr("over the 11 ranks of tensor axis 'model' it leaves rank 0 nothing"));
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}, {"context", 2}});
    const auto model = models::make_language_model(model_of("llama"), 13);
    nn::Module& m = *model;
    EXPECT_THROW(shard(m, mesh), ConfigError) << "leaves out axis 'context'";
    EXPECT_THROW(shard(m, mesh, {.context_axis = "sequence"}), ConfigError);
    EXPECT_THROW(shard(m, mesh, {.replica_axis = "context", .context_axis = "context"}), ConfigError);
    EXPECT_THROW(shard(m, mesh, {.tensor_axis = "context", .context_axis = "context"}), ConfigError);
  }, {.threads_per_rank = 1});
  // Two axes that cut sequences share the heads successively.
  run_local(6, [](World& w) {
    const Mesh mesh = w.mesh({{"a", 2}, {"b", 3}});
    const Tensor qkv = full_of({kF32, {2, 9, 12}, Layout(mesh.spec, Placement::shard(1))}, 1.0);
    nn::ContextRegion(qkv, OwnershipMap::even(2, 2));
    EXPECT_THAT([&] { nn::ContextRegion(qkv, OwnershipMap::even(2, 3)); },
                ::testing::ThrowsMessage<ConfigError>(HasSubstr("the 3 ranks of context axis 'b' cannot share 4 heads, of which "
                                                                "a rank of axis 'a' has as few as 2; at most 2 can")));
  }, {.threads_per_rank = 1});
  // An axis that shard() took for replicas cuts the sequence: the error comes from attention, before anything is sent.
  run_local(11, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}, {"more", 11}});
    const auto model = models::make_language_model(model_of("llama"), 13);
    shard(*model, mesh, {.replica_axis = "more"});
    materialize(*model, Device::cpu());
    const Tensor tokens = full_of({kI32, {2, 9}, Layout(mesh.spec, {Placement::shard(0), Placement::shard(1)})}, 1.0);
    EXPECT_THAT([&] { model->loss(tokens, tokens, {.divide_by = 18.0}); },
                ::testing::ThrowsMessage<ConfigError>(HasSubstr("'blocks.0.attention.qkv': the 11 ranks of context axis 'more' cannot "
                                                                "share 10 heads that read 5 key heads")));
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
