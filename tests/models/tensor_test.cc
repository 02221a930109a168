// Tensor and sequence parallelism with sharding: a mesh (data, model) whose second axis cuts heads, hidden units, the vocabulary and
// sequences. Gradients in f64; the bits of every strategy on the same mesh; the communication along each axis, and its bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;

// Six heads for GPT-2, and six that read three key heads for Llama; hidden units that six ranks can share.
models::ModelConfig model_of(const std::string& type) {
  models::ModelConfig m = tiny_model(type, 6, 3);
  m.mlp_width = 48;
  return m;
}

models::TrainConfig tensor(int64_t ranks, const char* strategy = "full_shard", const std::string& type = "gpt2") {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type);
  c.sharding.strategy = strategy;
  c.sharding.tensor = ranks;
  return c;
}

MeshSizes mesh(int replicas, int data, int model) { return {replicas, data, 0, model}; }

class TensorGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, MeshSizes, int>> {};

TEST_P(TensorGradients, EqualUnshardedInF64) {
  const auto [type, strategy, sizes, rows] = GetParam();
  expect_gradients_of_one_rank(sizes.axes(), strategy, rows, model_of(type));
}

const auto kStrategies = ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate");
INSTANTIATE_TEST_SUITE_P(Meshes, TensorGradients,
                         ::testing::Combine(::testing::Values("gpt2", "llama", "untied llama", "qwen3", "olmo", "gemma2"), kStrategies,
                                            ::testing::Values(mesh(0, 1, 1), mesh(0, 1, 2), mesh(0, 1, 3), mesh(0, 2, 2),
                                                              mesh(0, 3, 2), mesh(0, 2, 3)),
                                            ::testing::Values(7)));
// Groups of which some have no row, more ranks than the number of tokens is divisible by, and all three axes.
INSTANTIATE_TEST_SUITE_P(Uneven, TensorGradients,
                         ::testing::Combine(::testing::Values("gpt2"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(mesh(0, 1, 4), mesh(0, 1, 5), mesh(2, 1, 2), mesh(2, 2, 2)),
                                            ::testing::Values(3, 1)));

INSTANTIATE_TEST_SUITE_P(NormedHeads, TensorGradients,
                         ::testing::Combine(::testing::Values("qwen3", "olmo"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(mesh(2, 1, 2), mesh(2, 2, 2)), ::testing::Values(3, 1)));

// More ranks than the three key heads, which are cut into six halves: one for each rank, or not; combined with a context axis over which
// the query heads of a copy are shared.
INSTANTIATE_TEST_SUITE_P(Copies, TensorGradients,
                         ::testing::Combine(::testing::Values("llama", "untied llama", "qwen3", "olmo"), ::testing::Values("full_shard", "replicate"),
                                            ::testing::Values(mesh(0, 1, 4), mesh(0, 1, 6), mesh(0, 2, 5), mesh(2, 1, 4),
                                                              MeshSizes{0, 1, 2, 3}, MeshSizes{0, 0, 1, 5}),
                                            ::testing::Values(3)));

TEST(Tensor, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  for (const auto& [type, ranks] : {std::pair("gpt2", 2), {"untied llama", 2}, {"qwen3", 2}, {"qwen3", 4}, {"olmo", 2}, {"olmo", 4}}) {
    const int world = 2 * ranks;
    const TrainedRun expected = train_tiny(tensor(ranks, "full_shard", type), world, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"shard_grad_op", "zero1"})
      expect_same_bits(expected, train_tiny(tensor(ranks, strategy, type), world, kSteps));
    models::TrainConfig c = tensor(ranks, "full_shard", type);
    c.sharding.prefetch_bytes = 0;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
    c = tensor(ranks, "full_shard", type);
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, world, kSteps));
  }
}

// Random draws do not depend on how layers are cut: neither initial values nor dropout masks.
TEST(Tensor, TrainsAsOneRankDoes) {
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    models::TrainConfig c = tensor(1, "full_shard", type);
    c.model.dropout = 0.2;
    c.train.micro_batches = 2;
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const int ranks : {2, 3, 4}) {  // 4: more than Llama has key heads
      c.sharding.tensor = ranks;
      const TrainedRun actual = train_tiny(c, 2 * ranks, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << " " << ranks;
      for (int s = 0; s < kSteps; ++s) {
        EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
        EXPECT_NEAR(expected.norms[s], actual.norms[s], 2e-4 * expected.norms[s]);
      }
    }
  }
}

TEST(Tensor, FirstValuesAreThoseOfOneRank) {
  for (const char* type : {"gpt2", "untied llama"}) {
    const auto values = [&](const Axes& axes) {
      Whole whole;
      run_local(num_ranks(axes), [&](World& w) {
        whole.collect(*tiny_model_f64(w.mesh(axes), {}, {}, 5, model_of(type)), false);
      }, {.threads_per_rank = 1});
      return whole.values();
    };
    const Values expected = values({{"data", 1}});
    for (const MeshSizes& s : {mesh(0, 1, 2), mesh(0, 2, 3), mesh(0, 3, 2), mesh(2, 1, 2)})
      EXPECT_EQ(max_difference(expected, values(s.axes())), 0.0);
  }
}

// A cut parameter as a whole, its gradient, and setting it from whole values.
TEST(Tensor, WholeParametersInAndOut) {
  run_local(6, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}, {"model", 3}});
    const auto model = tiny_model_f64(mesh, {}, {}, 5, model_of("untied llama"));
    const auto other = tiny_model_f64(mesh, {}, {}, 6, model_of("untied llama"));
    const TinyBatch batch = tiny_batch(mesh, 0, 7);
    {
      Recording recording;
      recording.backward(model->loss(batch.tokens, batch.targets, {.divide_by = 63.0}));
    }
    const auto from = model->parameters(), to = other->parameters();
    int cut = 0;
    for (size_t i = 0; i < from.size(); ++i) {
      cut += from[i].cut_axis() == 1;
      const Tensor whole = full_parameter(from[i]);
      EXPECT_FALSE(identical(whole, full_parameter(to[i])) && from[i].shape().rank() > 1) << from[i].name();
      assign(to[i], whole);
      EXPECT_TRUE(identical(whole, full_parameter(to[i]))) << from[i].name();
      EXPECT_EQ(full_gradient(from[i]).shape(), from[i].shape());
    }
    EXPECT_EQ(cut, 2 * 5 + 2);
    const double loss =
        redistribute(model->loss(batch.tokens, batch.targets, {.divide_by = 63.0}), Layout(mesh.spec, Placement::invariant())).item<double>();
    EXPECT_EQ(loss,
              redistribute(other->loss(batch.tokens, batch.targets, {.divide_by = 63.0}), Layout(mesh.spec, Placement::invariant())).item<double>());
  }, {.threads_per_rank = 1});
}

// For rank 0, which has 3 rows of the batch, 4 of their 9 tokens and 6 of the 13 words.
//
// A block all-gathers activations twice and reduce-scatters partial sums twice; the backward does the reverse, and gathers the activations
// again for the weights' gradients. The embedding reduce-scatters once, the head all-gathers once. In addition a few bytes per token are
// sent: tokens, targets, and the log-sum-exps of each part of the vocabulary. Only the gradients of replicated parameters are summed along
// the tensor axis, and units gather only their own share.
TEST(Tensor, WhatTravelsAlongWhichAxis) {
  const int64_t layers = tensor(1).model.layers, width = tensor(1).model.width;
  constexpr int64_t kRows = 3, kMine = kRows * 4, kOthers = kRows * 5, kSize = 4;
  for (const char* type : {"gpt2", "llama", "untied llama"}) {
    SCOPED_TRACE(type);
    models::TrainConfig one = tensor(1, "full_shard", type), two = tensor(2, "full_shard", type);
    one.sharding.prefetch_bytes = two.sharding.prefetch_bytes = 0;  // which units stay for the backward then does not depend on sizes
    auto whole = traffic(models::plan_step(one, 13, 0, 2, 1, "local").tape);
    auto cut = traffic(models::plan_step(two, 13, 0, 4, 1, "local").tape);
    const int64_t log_sum_exps = kMine + kOthers;
    EXPECT_EQ(cut["all_gather model"].count, 6 * layers + 3 + 3);  // embedding and head; tokens, targets, log-sum-exps
    EXPECT_EQ(cut["all_gather model"].bytes, kSize * ((6 * layers + 3) * kOthers * width + 2 * kOthers + log_sum_exps));
    EXPECT_EQ(cut["reduce_scatter model"].count, 4 * layers + 2 + 1);
    EXPECT_EQ(cut["reduce_scatter model"].bytes, kSize * ((4 * layers + 2) * kMine * width + log_sum_exps));
    // Norms and biases of a block; positions and the last norm. A rank's share of these, in lines of 32 values.
    const bool gpt = std::string(type) == "gpt2";
    EXPECT_EQ(cut["all_reduce model"].count, layers + 1);
    EXPECT_EQ(cut["all_reduce model"].bytes, kSize * 32 * (layers * (gpt ? 3 : 1) + (gpt ? 5 : 1)));
    const int64_t with_one_buffer = std::string(type) == "untied llama" ? 3 : 0;  // tables, which are cut, and the root, which is not
    EXPECT_EQ(cut["all_gather data"].count, 2 * whole["all_gather data"].count - with_one_buffer) << "of a unit what is cut, and what is not";
    EXPECT_LT(cut["all_gather data"].bytes, whole["all_gather data"].bytes);
    EXPECT_EQ(cut.size(), 5u);
  }
}

// Six ranks, each with one query head and half a key head: additionally the other halves of the keys and values of each token are sent, and
// their gradients in the backward.
TEST(Tensor, WholeKeysArePutTogether) {
  const models::ModelConfig m = models::resolved(model_of("llama"));
  const int64_t layers = m.layers, both = 2 * m.kv_heads * m.head_dim;
  constexpr int64_t kRows = 3, kTokens = 9, kSize = 4;  // 6 rows for 2 groups of ranks
  auto shared = traffic(models::plan_step(tensor(6, "full_shard", "llama"), 13, 0, 12, 1, "local").tape);
  auto plain = traffic(models::plan_step(tensor(6, "full_shard", "gpt2"), 13, 0, 12, 1, "local").tape);
  EXPECT_EQ(shared["all_gather model"].count, plain["all_gather model"].count + layers);
  EXPECT_EQ(shared["reduce_scatter model"].count, plain["reduce_scatter model"].count + layers);
  EXPECT_EQ(shared["all_gather model"].bytes, plain["all_gather model"].bytes + layers * kSize * kRows * kTokens * both * 5 / 6);
  EXPECT_EQ(shared["reduce_scatter model"].bytes, plain["reduce_scatter model"].bytes + layers * kSize * kRows * kTokens * both * 5 / 6);
}

TEST(Tensor, UnitsOfHeads) {
  EXPECT_EQ(nn::head_units(6, 3, 4, 1), 3);
  EXPECT_EQ(nn::head_units(6, 3, 4, 3), 3);
  EXPECT_EQ(nn::head_units(6, 3, 4, 4), 6);
  EXPECT_EQ(nn::head_units(6, 3, 4, 7), 6) << "as many as there can be";
  EXPECT_EQ(nn::head_units(24, 2, 64, 6), 8) << "three copies would do, and do not divide the width";
  EXPECT_EQ(nn::head_units(9, 3, 4, 4), 3);
  EXPECT_EQ(nn::head_units(64, 4, 128, 8), 8);
}

struct Two : nn::Module {
  nn::SelfAttention a, b;
  explicit Two(const nn::AttentionConfig& c) : a(c), b(c) {}
  Tensor forward(const Tensor& x) { return a(b(x)); }
  SHEAF_FIELDS(a, b);
};

// A layer that is sharded by itself, and one inside a module that is sharded.
TEST(Tensor, LayersShardedAloneAreCutAlike) {
  run_local(4, [](World& w) {
    const nn::AttentionConfig config{.width = 24, .heads = 6, .kv_heads = 3};
    const auto output = [&](const Mesh& mesh, const std::string& axis, bool alone) {
      Two model(config);
      const ShardOptions options{.tensor_axis = axis};
      if (alone) shard(model.a, mesh, options);
      shard(model, mesh, options);
      EXPECT_EQ(model.a.qkv.weight.cut()->granule(), axis.empty() ? 3 : 6);
      EXPECT_EQ(model.b.projection.weight.cut()->granule(), axis.empty() ? 8 : 4);
      materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
      std::vector<double> values(2 * 5 * 24);
      for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<double>(i));
      const Tensor x = Tensor::from(values, {2, 5, 24});
      const Tensor y = model(redistribute(x, Layout(mesh.spec)));
      return redistribute(y, Layout(mesh.spec)).to_vector<double>();
    };
    const Mesh four = w.mesh({{"data", 1}, {"model", 4}}), all = w.mesh({{"data", 4}});
    const std::vector<double> expected = output(all, "", false);
    for (const bool alone : {false, true}) {
      const std::vector<double> actual = output(four, "model", alone);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-13);
    }
  }, {.threads_per_rank = 1});
}

// Logits are placed like tokens, with the whole vocabulary.
TEST(Tensor, LogitsHaveAllOfTheVocabulary) {
  const auto logits = [](const Axes& axes, const Placement& along_model) {
    std::vector<double> out;
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      models::GptConfig c;
      c.layers = 1, c.heads = 6, c.width = 24, c.context = 9, c.vocab = 13;
      models::Gpt model(c);
      shard(model, mesh, {.tensor_axis = axes.size() > 1 ? "model" : ""});
      materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
      const TinyBatch batch = tiny_batch(mesh, 0, 7);
      Layout layout = batch.tokens.layout();
      if (axes.size() > 1) layout[1] = along_model;
      const Tensor y = model.logits(redistribute(batch.tokens, layout));
      EXPECT_EQ(y.type(), (Type{kF64, {7, 9, 13}, layout}));
      const Tensor whole = redistribute(y, Layout(mesh.spec));
      if (w.rank() == 0) out = whole.to_vector<double>();
    }, {.threads_per_rank = 1});
    return out;
  };
  const std::vector<double> expected = logits({{"data", 1}}, {});
  for (const MeshSizes& s : {mesh(0, 1, 2), mesh(0, 2, 3)})
    for (const Placement& p : {Placement::replicate(), Placement::shard(1)}) {
      const std::vector<double> actual = logits(s.axes(), p);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-14);
    }
}

TEST(Tensor, ATokenOutsideOfAllPartsIsNamed) {
  run_local(3, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}, {"model", 3}});
    const auto model = tiny_model_f64(mesh, {}, {}, 5, model_of("untied llama"));
    for (const int32_t bad : {-7, 13}) {
      TinyBatch batch = tiny_batch(mesh, 0, 7);
      for (Tensor* tensor : {&batch.tokens, &batch.targets}) {
        int32_t& first = *tensor->view().as<int32_t>();
        const int32_t before = std::exchange(first, bad);
        EXPECT_THAT([&] { model->loss(batch.tokens, batch.targets, {.divide_by = 63.0}); },
                    ::testing::ThrowsMessage<DataError>(HasSubstr(tensor == &batch.tokens
                                                               ? str("token ", bad, " at position [0,0] is outside the vocabulary of 13")
                                                               : str("target ", bad, " at position [0,0] is none of 13 classes"))));
        first = before;
      }
    }
  }, {.threads_per_rank = 1});
}

TEST(Tensor, IgnoredTargetsCountNothing) {
  const auto run = [](const Axes& axes, double& loss) {
    Whole whole;
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      const auto model = tiny_model_f64(mesh, {}, {}, 5, model_of("gpt2"));
      const TinyBatch batch = tiny_batch(mesh, 0, 7);
      const View targets = batch.targets.view();
      for (int64_t i = 0; i < targets.numel(); ++i)
        if (int32_t& t = targets.as<int32_t>()[i]; t % 3 == 1) t = -1;
      Recording recording;
      const Tensor sum = model->loss(batch.tokens, batch.targets, {.divide_by = 63.0});
      recording.backward(sum);
      const Tensor everywhere = redistribute(sum, Layout(mesh.spec, Placement::invariant()));
      if (w.rank() == 0) loss = everywhere.item<double>();
      whole.collect(*model, true);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  double expected_loss = 0, loss = 0;
  const Values expected = run({{"data", 1}}, expected_loss);
  for (const MeshSizes& s : {mesh(0, 1, 2), mesh(0, 2, 3)}) {
    EXPECT_LE(max_difference(expected, run(s.axes(), loss)), 1e-12 * max_magnitude(expected));
    EXPECT_NEAR(loss, expected_loss, 1e-13);
  }
}

TEST(Tensor, TrainsInBf16) {
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    models::TrainConfig c = tensor(1, "full_shard", type);
    c.train.dtype = "bf16";
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const int ranks : {3, 6}) {
      c.sharding.tensor = ranks;
      const TrainedRun actual = train_tiny(c, 6, kSteps);
      for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 0.01);
    }
  }
}

TEST(Tensor, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const auto& [type, ranks] : {std::pair("gpt2", 2), {"qwen3", 2}, {"qwen3", 4}, {"olmo", 2}, {"olmo", 4}})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
      models::TrainConfig c = tensor(ranks, strategy, type);
      c.train.micro_batches = 2;
      expect_planned_tapes(c, 4);
    }
}

// The memory that a rank needs for a step shrinks with the axis: activations and weights of the blocks.
TEST(Tensor, ARankHoldsItsShareOfABlock) {
  models::TrainConfig c = tensor(1);
  c.model.width = 96;
  c.model.mlp_width = 384;
  c.model.layers = 8;
  c.sharding.strategy = "replicate";
  const int64_t whole = models::plan_step(c, 13, 0, 1, 1, "local").peak.bytes;
  c.sharding.tensor = 3;
  EXPECT_LT(models::plan_step(c, 13, 0, 3, 1, "local").peak.bytes, whole / 2);
}

TEST(Tensor, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {Axes{{"data", 1}}, Axes{{"data", 3}}, mesh(0, 2, 2).axes(), mesh(0, 1, 3).axes(),
                                    mesh(0, 2, 3).axes(), mesh(2, 1, 2).axes(), mesh(0, 1, 4).axes()};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, model_of("llama"));
}

TEST(Tensor, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(4, tensor(3)), HasSubstr("sharding.tensor 3: 4 ranks cannot be divided"));
  EXPECT_THAT(refusal(1, tensor(2)), HasSubstr("1 rank cannot"));
  models::TrainConfig both = tensor(3);
  both.sharding.replicas = 2;
  EXPECT_THAT(refusal(4, both), HasSubstr("sharding.tensor 3: 2 ranks cannot"));
  const std::string message = refusal(7, tensor(7, "full_shard", "llama"));
  EXPECT_THAT(message, HasSubstr("'blocks.0.attention.qkv.weight' [48,24]"));
  EXPECT_THAT(message, HasSubstr("over the 7 ranks of tensor axis 'model' it leaves rank 0 nothing; at most 6 can share it"));
  models::TrainConfig odd = tensor(4);
  odd.model = tiny_model("llama", 9, 3);
  EXPECT_THAT(refusal(4, odd), HasSubstr("at most 3 can share it")) << "three queries read a key head of four elements: no number divides both";
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}, {"model", 2}});
    const auto model = models::make_language_model(tiny_config().model, 13);
    EXPECT_THROW(shard(*model, mesh), ConfigError) << "leaves out axis 'model'";
    EXPECT_THROW(shard(*model, mesh, {.tensor_axis = "data"}), ConfigError);
    EXPECT_THROW(shard(*model, mesh, {.replica_axis = "model", .tensor_axis = "model"}), ConfigError);
    EXPECT_THROW(shard(*model, mesh, {.tensor_axis = "tensor"}), ConfigError);
    EXPECT_THROW(StrategyChoice("tensor_parallel"), ConfigError);
    const auto refused = [](auto&& f) -> std::string {
      try {
        f();
      } catch (const ConfigError& e) {
        return e.what();
      }
      return "nothing is refused";
    };
    const Mesh alone = w.mesh({{"model", 4}}), one = w.mesh({{"data", 1}, {"model", 4}});
    EXPECT_THAT(refused([&] { shard(*model, alone, {.tensor_axis = "model"}); }),
                HasSubstr("(model=4) has no axis 'data' (ShardOptions::axis, by default); where ranks share layers and nothing else, its size is 1"));
    for (auto& [path, module] : model->named_modules())
      if (model->is_block(*module)) shard(*module, one, {.tensor_axis = "model"});
    EXPECT_THAT(refused([&] { materialize(*model); }), HasSubstr("is in no unit, though parts of the model are sharded"));
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
