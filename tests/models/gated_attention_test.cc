// The features of Qwen3-Next's blocks other than linear attention, in blocks without it: gates on the heads' output, partially rotated
// heads, and shared experts with a gate. Each by its formula; gradients on every mesh, the bits of every strategy, one rank's steps, the
// bytes of plans, and the same tokens with a cache as without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 6;

models::ModelConfig gated_model(int64_t kv_heads = 3) {
  models::ModelConfig m = tiny_qwen3_next();
  m.linear_key_heads = m.linear_value_heads = m.full_attention_every = 0;
  m.kv_heads = kv_heads;
  return m;
}

models::TrainConfig config_of(int64_t experts = 1, int64_t tensor = 1, int64_t context = 1) {
  models::TrainConfig c = tiny_config();
  c.model = gated_model();
  c.sharding.experts = experts;
  c.sharding.tensor = tensor;
  c.sharding.context = context;
  return c;
}

// ---- the formulas ---------------------------------------------------------------------------------------------------

Tensor identity(int64_t n) {
  std::vector<double> out(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i * n + i)] = 1;
  return Tensor::from(out, {n, n});
}

void expect_near(const Tensor& got, const Tensor& want) {
  const std::vector<double> g = got.to_vector<double>(), w = want.to_vector<double>();
  ASSERT_EQ(g.size(), w.size());
  for (size_t i = 0; i < g.size(); ++i) EXPECT_NEAR(g[i], w[i], 1e-12) << i;
}

// One gate per element of a head, computed from the layer's input.
TEST(GatedAttention, MultipliesWhatHeadsGive) {
  nn::AttentionConfig a;
  a.width = 8, a.heads = 2, a.bias = false, a.gate = true, a.init = nn::Init::normal(0.5);
  nn::SelfAttention with(a);
  a.gate = false;
  nn::SelfAttention without(a);
  for (auto* m : {&with, &without}) {
    materialize(*m, Device::cpu(), {.seed = 2, .dtype = kF64});
    assign(m->projection.weight, identity(8));
  }
  const Tensor x = randn({kF64, {2, 5, 8}, {}}, Key{1});
  expect_near(with(x), without(x) * sigmoid(linear(x, with.gate->weight)));
}

// One gate per token.
TEST(GatedAttention, MultipliesWhatSharedExpertsGive) {
  nn::MixtureConfig e;
  e.width = 8, e.hidden = 4, e.experts = 3, e.shared_hidden = 6, e.shared_gate = true, e.init = e.projection_init = nn::Init::normal(0.5);
  nn::MixtureOfExperts gated(e);
  e.shared_gate = false;
  nn::MixtureOfExperts plain(e);
  e.shared_hidden = 0;
  nn::MixtureOfExperts alone(e);
  for (auto* m : {&gated, &plain, &alone}) materialize(*m, Device::cpu(), {.seed = 2, .dtype = kF64});
  const Tensor x = randn({kF64, {2, 5, 8}, {}}, Key{1}), chosen = alone(x);
  expect_near(gated(x) - chosen, (plain(x) - chosen) * sigmoid(linear(x, gated.shared_gate->weight)));
  e.shared_gate = true;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(e); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("shared_gate without shared experts (shared_hidden 0)")));
}

// Only the last elements of each head are rotated: if they do not enter the scores, positions do not matter.
TEST(GatedAttention, APartOfAHeadIsRotated) {
  nn::AttentionConfig a;
  a.width = 12, a.heads = 2, a.bias = false, a.rope_theta = 10.0, a.rotary_dim = 2;
  nn::SelfAttention layer(a);
  a.rope_theta = 0;
  nn::SelfAttention still(a);
  for (auto* m : {&layer, &still}) materialize(*m, Device::cpu(), {.seed = 2, .dtype = kF64});
  const Tensor x = randn({kF64, {2, 5, 12}, {}}, Key{1});
  EXPECT_NE(layer(x).to_vector<double>(), still(x).to_vector<double>());
  std::vector<double> weight = full_parameter(layer.qkv.weight).to_vector<double>();
  for (size_t row = 0; row < 12; ++row)  // queries
    if (row % 6 >= 4) std::fill_n(weight.begin() + static_cast<std::ptrdiff_t>(row * 12), 12, 0.0);
  for (auto* m : {&layer, &still}) assign(m->qkv.weight, Tensor::from(weight, {36, 12}));
  EXPECT_EQ(layer(x).to_vector<double>(), still(x).to_vector<double>());
  a.rope_theta = 10.0;
  for (const int64_t bad : {3, 8, -2}) {
    a.rotary_dim = bad;
    const std::string said = str("rotary_dim ", bad, ": an even number of elements of a head, which has 6");
    EXPECT_THAT([&] { nn::SelfAttention m(a); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr(said)));
  }
}

TEST(GatedAttention, LatentAttentionHasNone) {
  for (const bool gate : {true, false}) {
    models::LlamaConfig c;
    c.kv_heads = 0, c.kv_lora_rank = 4;
    if (gate) c.attention_gate = true;
    else c.rotary_dim = 2;
    EXPECT_THAT([&] { models::Llama m(c); },
                ::testing::ThrowsMessage<ConfigError>(HasSubstr("attention_gate, rotary_dim, query_pre_attn_scalar nor attn_logit_softcapping")));
  }
}

// ---- on meshes ------------------------------------------------------------------------------------------------------

// With more ranks than key heads, ranks have copies of these, and the gates of their queries; experts are cut over ranks.
class GatedGradients : public ::testing::TestWithParam<Axes> {};

TEST_P(GatedGradients, EqualThoseOfOneRank) {
  for (const int64_t kv_heads : {1, 2, 6}) {
    models::ModelConfig m = gated_model(kv_heads);
    expect_gradients_of_one_rank(GetParam(), "full_shard", 3, m);
    m.end_of_text = 5;  // within documents
    expect_gradients_of_one_rank(GetParam(), "zero1", 3, m);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, GatedGradients,
                         ::testing::Values(Axes{{"data", 2}}, Axes{{"data", 1}, {"model", 4}}, Axes{{"data", 1}, {"context", 3}},
                                           Axes{{"data", 1}, {"gathered", 2}, {"model", 2}}, Axes{{"data", 2}, {"expert", 2}},
                                           Axes{{"data", 1}, {"context", 2}, {"model", 3}}, Axes{{"replica", 2}, {"data", 2}}),
                         [](const auto& info) {
                           std::string out;
                           for (const auto& axis : info.param) out += str(out.empty() ? "" : "_", axis.name, axis.size);
                           return out;
                         });

TEST(GatedAttention, GatesAreTrained) {
  const Values gradients = gradients_f64(Axes{{"data", 1}}, "replicate", 3, {}, gated_model());
  for (const char* name : {"attention.gate.weight", "moe.shared_gate.weight", "moe.shared.gate.weight"}) {
    const auto found = gradients.find(str("blocks.1.", name));
    ASSERT_NE(found, gradients.end()) << name;
    EXPECT_GT(max_magnitude({*found}), 1e-9 * max_magnitude(gradients)) << name;
  }
}

// Ranks of a tensor axis have the gates of their own heads; the shared experts' gate, one number, is replicated.
TEST(GatedAttention, ARankHasTheGatesOfItsHeads) {
  run_local(3, [](World& world) {
    models::TrainingStep step(config_of(1, 3), 13, world, Device::meta());
    const auto& block = dynamic_cast<models::Llama&>(step.model()).blocks[1];
    const nn::Parameter &gate = block.attention->gate->weight, &qkv = block.attention->qkv.weight;
    ASSERT_GE(gate.cut_axis(), 0);
    EXPECT_EQ(gate.cut_axis(), qkv.cut_axis());
    EXPECT_EQ(gate.cut()->granule(), 2 * 6);  // rows of the heads of a key head
    EXPECT_EQ(block.moe->shared_gate->weight.cut_axis(), -1);
  }, {.threads_per_rank = 1});
}

TEST(GatedAttention, StrategiesPrefetchUnitsRecomputeAndProgramsChangeNoBit) {
  struct Case { int experts, tensor, context, world; const char* dtype; };
  for (const auto& [experts, tensor, context, world, dtype] :
       {Case{1, 1, 1, 2, "bf16"}, Case{2, 1, 1, 4, "f32"}, Case{1, 2, 1, 4, "f32"}, Case{2, 1, 2, 4, "f32"}}) {
    SCOPED_TRACE(str(experts, " ", tensor, " ", context, " ", world));
    models::TrainConfig c = config_of(experts, tensor, context);
    c.train.dtype = dtype;
    expect_ways_change_no_bit(c, world, kSteps);
  }
}

TEST(GatedAttention, TrainsAsOneRankDoes) {
  models::TrainConfig c = config_of();
  c.model.dropout = 0.2;
  c.train.micro_batches = 3;
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  for (const auto& [experts, tensor, context, world] : {std::tuple{1, 1, 1, 3}, {2, 1, 1, 2}, {1, 4, 1, 4}, {1, 2, 2, 4}}) {
    c.sharding.experts = experts, c.sharding.tensor = tensor, c.sharding.context = context;
    const TrainedRun actual = train_tiny(c, world, kSteps);
    EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << experts << " " << tensor << " " << context << " " << world;
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
  }
  c.sharding.experts = c.sharding.tensor = c.sharding.context = 1;
  expect_stages_of_one_rank(c, 3);
}

TEST(GatedAttention, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* dtype : {"f32", "bf16"})
    for (const auto& [experts, tensor, context, world] : {std::tuple{1, 1, 1, 2}, {2, 1, 1, 4}, {1, 2, 2, 4}}) {
      SCOPED_TRACE(str(dtype, " ", experts, " ", tensor, " ", context, " ", world));
      models::TrainConfig c = config_of(experts, tensor, context);
      c.train.dtype = dtype;
      expect_planned_tapes(c, world);
      c.train.recompute = "selective";
      c.train.compile = true;
      expect_planned_tapes(c, world);
    }
}

TEST(GatedAttention, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"data", 1}, {"expert", 2}}, {{"data", 1}, {"model", 5}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, gated_model());
}

// ---- generation -----------------------------------------------------------------------------------------------------

TEST(GatedAttention, ACacheGivesTheSameLogits) { expect_cached_logits(gated_model()); }

}  // namespace
}  // namespace sheaf::testing
