// Blocks like gpt-oss's: attention with sinks and windows, experts with biases and a clamped gate. Gradients on every mesh, the bits of
// every strategy, one rank's steps, and the same tokens with a cache as without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 6;

models::TrainConfig config_of(int64_t experts = 1, const char* strategy = "full_shard", int64_t tensor = 1, int64_t context = 1) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_gpt_oss();
  c.sharding.strategy = strategy;
  c.sharding.experts = experts;
  c.sharding.tensor = tensor;
  c.sharding.context = context;
  return c;
}

class GptOssGradients : public ::testing::TestWithParam<std::tuple<Axes, int64_t>> {};

TEST_P(GptOssGradients, EqualThoseOfOneRank) {
  const auto& [axes, key_heads] = GetParam();
  models::ModelConfig m = tiny_gpt_oss(6, key_heads);
  expect_gradients_of_one_rank(axes, "full_shard", 3, m);
  m.end_of_text = 5;  // within documents
  expect_gradients_of_one_rank(axes, "zero1", 3, m);
}

// More ranks than the three key heads, some of which are replicated; also with both tensor and context axes.
INSTANTIATE_TEST_SUITE_P(Meshes, GptOssGradients,
                         ::testing::Combine(::testing::Values(Axes{{"data", 3}}, Axes{{"data", 1}, {"model", 2}}, Axes{{"data", 1}, {"model", 3}},
                                                              Axes{{"data", 1}, {"model", 5}}, Axes{{"data", 2}, {"context", 2}},
                                                              Axes{{"data", 1}, {"context", 5}}, Axes{{"data", 1}, {"gathered", 2}},
                                                              Axes{{"data", 1}, {"gathered", 3}, {"model", 2}},
                                                              Axes{{"data", 1}, {"context", 2}, {"model", 2}}, Axes{{"data", 2}, {"expert", 2}},
                                                              Axes{{"data", 1}, {"expert", 5}}, Axes{{"replica", 2}, {"data", 2}}),
                                            ::testing::Values(1, 3, 6)),
                         [](const auto& info) {
                           std::string out = str("keys", std::get<1>(info.param));
                           for (const auto& axis : std::get<0>(info.param)) out += str("_", axis.name, axis.size);
                           return out;
                         });

// Every one of its own parameters has a nonzero gradient.
TEST(GptOss, AllOfItIsTrained) {
  const Values gradients = gradients_f64(Axes{{"data", 1}}, "replicate", 3, {}, tiny_gpt_oss());
  for (const char* name : {"attention.sinks", "attention.projection.bias", "attention.qkv.bias", "moe.router.bias", "moe.experts.gate_bias",
                           "moe.experts.up_bias", "moe.experts.down_bias"}) {
    const auto found = gradients.find(str("blocks.1.", name));
    ASSERT_NE(found, gradients.end()) << name;
    EXPECT_GT(max_magnitude({*found}), 1e-9 * max_magnitude(gradients)) << name;
  }
}

TEST(GptOss, StrategiesPrefetchUnitsRecomputeAndProgramsChangeNoBit) {
  struct Case { int experts, tensor, context, world; };
  for (const auto& [experts, tensor, context, world] : {Case{1, 1, 1, 2}, Case{2, 1, 1, 4}, Case{1, 2, 1, 4}, Case{2, 1, 2, 4}}) {
    SCOPED_TRACE(str(experts, " ", tensor, " ", context, " ", world));
    expect_ways_change_no_bit(config_of(experts, "full_shard", tensor, context), world, kSteps);
  }
}

TEST(GptOss, TrainsAsOneRankDoes) {
  models::TrainConfig c = config_of();
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  for (const auto& [experts, tensor, world] : {std::tuple{1, 1, 3}, {2, 1, 2}, {1, 4, 4}, {5, 1, 5}}) {
    c.sharding.experts = experts, c.sharding.tensor = tensor;
    const TrainedRun actual = train_tiny(c, world, kSteps);
    EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << experts << " " << tensor << " " << world;
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
  }
  c.sharding.experts = c.sharding.tensor = 1;
  c.train.micro_batches = 3;
  expect_stages_of_one_rank(c, 3);
}

TEST(GptOss, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* dtype : {"f32", "bf16"})
    for (const auto& [experts, tensor, context, world] : {std::tuple{1, 1, 1, 2}, {2, 1, 1, 4}, {1, 2, 2, 4}}) {
      SCOPED_TRACE(str(dtype, " ", experts, " ", tensor, " ", context, " ", world));
      models::TrainConfig c = config_of(experts, "full_shard", tensor, context);
      c.train.dtype = dtype;
      c.train.micro_batches = 2;
      expect_planned_tapes(c, world);
      c.train.recompute = "selective";
      c.train.compile = true;
      expect_planned_tapes(c, world);
    }
}

// Ranks that share experts have their own biases, and those that share layers their own sinks.
TEST(GptOss, ARankHasItsBiasesAndSinks) {
  run_local(4, [](World& world) {
    models::TrainingStep step(config_of(2, "full_shard", 2), 13, world, Device::meta());
    auto& llama = dynamic_cast<models::Llama&>(step.model());
    const auto axis = [&](const nn::Parameter& p) { return p.cut_axis() < 0 ? "" : step.mesh().spec->name(p.cut_axis()); };
    for (const nn::Parameter* p :
         {&llama.blocks[1].moe->experts.gate_bias, &llama.blocks[1].moe->experts.up_bias, &llama.blocks[1].moe->experts.down_bias})
      EXPECT_EQ(axis(*p), "expert") << p->name();
    EXPECT_EQ(axis(llama.blocks[1].attention->sinks), "model");
  }, {.threads_per_rank = 1});
}

// Whatever the compute dtype, gradients of biases are added up in f32, each in its slot.
TEST(GptOss, GradientsOfBiasesAreStoredAsSums) {
  models::TrainConfig c = config_of();
  c.train.dtype = "bf16";
  const std::string text = to_text(models::plan_step(c, 13, 0, 2, 1, "local").tape);
  int found = 0;
  for (size_t at = 0; (at = text.find("= expert_bias_gradient", at)) != std::string::npos; ++at) {
    const std::string line = text.substr(at, text.find('\n', at) - at);
    EXPECT_THAT(line, HasSubstr("slot")) << line;
    ++found;
  }
  EXPECT_EQ(found, 3 * 3);
}

TEST(GptOss, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"data", 1}, {"expert", 2}}, {{"data", 1}, {"model", 5}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, tiny_gpt_oss());
}

// A sink takes the probability of a query that its keys do not get: none, all, and as much as one more key with the same score.
TEST(GptOss, SinksTakeAPartOfAttention) {
  nn::AttentionConfig a;
  a.width = 8, a.heads = 2, a.sinks = true;
  nn::SelfAttention with(a);
  a.sinks = false;
  nn::SelfAttention without(a);
  materialize(with, Device::cpu(), {.seed = 2, .dtype = kF64});
  materialize(without, Device::cpu(), {.seed = 2, .dtype = kF64});
  const Tensor x = randn({kF64, {2, 5, 8}, {}}, Key{1});
  const auto y = [&](double sink) {
    assign(with.sinks, Tensor::from(std::vector<double>{sink, sink}, {2}));
    return with(x).to_vector<double>();
  };
  const std::vector<double> whole = without(x).to_vector<double>(), none = y(-1e4), all = y(1e4);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(none[i], whole[i], 1e-14);
    EXPECT_NEAR(all[i], 0, 1e-14);  // the projection has a bias of zero
  }
  // If all scores are zero, the t-th query's keys get t / (t + 1).
  for (nn::SelfAttention* m : {&with, &without}) {
    std::vector<double> weight = full_parameter(m->qkv.weight).to_vector<double>();
    std::fill(weight.begin(), weight.begin() + 8 * 8, 0.0);  // queries
    assign(m->qkv.weight, Tensor::from(weight, {24, 8}));
  }
  const std::vector<double> even = without(x).to_vector<double>(), shared = y(0);
  for (size_t i = 0; i < even.size(); ++i) {
    const auto keys = static_cast<double>(i / 8 % 5 + 1);
    EXPECT_NEAR(shared[i], even[i] * keys / (keys + 1), 1e-14);
  }
}

TEST(GptOss, ACacheGivesTheSameLogits) { expect_cached_logits(tiny_gpt_oss()); }

TEST(GptOss, LatentAttentionHasNone) {
  models::LlamaConfig c;
  c.kv_heads = 0, c.kv_lora_rank = 4, c.attention_sinks = true;
  EXPECT_THAT([&] { models::Llama m(c); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("attention_sinks")));
}

}  // namespace
}  // namespace sheaf::testing
