// Sliding-window attention in models: which tokens affect which, on every mesh, in stages and in programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/models/attention_window.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

models::ModelConfig model_of(const std::string& type, int64_t window = 3, int64_t full_attention_every = 2) {
  models::ModelConfig m = tiny_model(type, 10, 5);
  m.layers = 3;
  m.window = window, m.full_attention_every = full_attention_every;
  return m;
}

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type);
  return c;
}

TEST(Windows, EachNthBlockSeesAll) {
  const auto windows = [](int64_t full_attention_every) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 7; ++i) out.push_back(models::window_of_block(i, 4, full_attention_every));
    return out;
  };
  EXPECT_EQ(windows(0), (std::vector<int64_t>{4, 4, 4, 4, 4, 4, 4}));
  EXPECT_EQ(windows(1), (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(windows(2), (std::vector<int64_t>{4, 0, 4, 0, 4, 0, 4}));
  EXPECT_EQ(windows(6), (std::vector<int64_t>{4, 4, 4, 4, 4, 0, 4}));
  const auto window_of = [](const auto& block) {
    if constexpr (requires { block.latent_attention; })
      return block.latent_attention ? block.latent_attention->config.window : block.attention->config.window;
    else return block.attention.config.window;
  };
  const auto model_windows = [&](const auto& model) {
    std::vector<int64_t> out;
    for (const auto& block : model.blocks) out.push_back(window_of(block));
    return out;
  };
  EXPECT_EQ(model_windows(models::Gpt({.layers = 4, .heads = 2, .width = 8, .window = 5, .full_attention_every = 3})),
            (std::vector<int64_t>{5, 5, 0, 5}));
  EXPECT_EQ(model_windows(models::Llama({.layers = 3, .window = 5})), (std::vector<int64_t>{5, 5, 5}));
  EXPECT_EQ(model_windows(models::Llama({.layers = 3, .kv_heads = 0, .kv_lora_rank = 4, .window = 5, .full_attention_every = 2})),
            (std::vector<int64_t>{5, 0, 5}));
  EXPECT_THAT([] { nn::SelfAttention({.width = 8, .heads = 2, .window = -1}); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("[attention] window -1")));
}

/// The tokens that affect the logits of the last of `tokens`: changing any other changes none of their bits.
std::vector<bool> tokens_that_count(const models::ModelConfig& config, int64_t tokens) {
  const auto model = models::make_language_model(config, 13);
  materialize(*model, Device::cpu(), {.seed = 4, .dtype = kF64});
  std::vector<int32_t> text;
  for (int64_t t = 0; t < tokens; ++t) text.push_back(static_cast<int32_t>(t * t % 13));
  const auto last = [&] { return slice(model->logits(Tensor::from(text, {1, tokens})), 1, tokens - 1, tokens).clone(); };
  const Tensor expected = last();
  std::vector<bool> out;
  for (int32_t& token : text) {
    const int32_t was = token;
    token = (token + 1) % 13;
    out.push_back(!identical(last(), expected));
    token = was;
  }
  return out;
}

// Each block reaches window - 1 tokens further back.
TEST(Windows, ReachAsFarAsTheirBlocks) {
  for (const char* type : {"gpt2", "llama"}) {
    models::ModelConfig m = model_of(type, 3, 0);
    m.context = 12;
    std::vector<bool> expected(12);
    std::fill(expected.end() - (1 + 3 * 2), expected.end(), true);
    EXPECT_EQ(tokens_that_count(m, 12), expected) << type;
    m.layers = 1;
    std::fill(expected.begin(), expected.end() - 3, false);
    EXPECT_EQ(tokens_that_count(m, 12), expected) << type;
    m.layers = 2, m.full_attention_every = 2;
    EXPECT_EQ(tokens_that_count(m, 12), std::vector<bool>(12, true)) << type;
  }
}

TEST(Windows, AsLongAsTheContextIsNone) {
  for (const char* type : {"gpt2", "untied llama"}) {
    models::TrainConfig c = config_of(type);
    c.model.window = 0, c.model.full_attention_every = 0;
    const TrainedRun expected = train_tiny(c, 1, 3);
    c.model.window = c.model.context;
    expect_same_bits(expected, train_tiny(c, 1, 3));
    c.model.window = c.model.context - 1;
    EXPECT_NE(train_tiny(c, 1, 3).losses, expected.losses);
  }
}

class WindowGradients : public ::testing::TestWithParam<std::tuple<std::string, Axes>> {};

TEST_P(WindowGradients, EqualThoseOfOneRank) {
  const auto [type, axes] = GetParam();
  models::ModelConfig m = model_of(type);
  expect_gradients_of_one_rank(axes, "full_shard", 3, m);
  m.end_of_text = 5;  // within documents
  expect_gradients_of_one_rank(axes, "zero1", 3, m);
}

INSTANTIATE_TEST_SUITE_P(Meshes, WindowGradients,
                         ::testing::Combine(::testing::Values("gpt2", "untied llama"),
                                            ::testing::Values(Axes{{"data", 2}}, MeshSizes{0, 1, 3, 0}.axes(),
                                                              MeshSizes{0, 1, 2, 2}.axes(), Axes{{"stage", 2, true}, {"data", 1}},
                                                              Axes{{"stage", 2, true}, {"data", 1}, {"context", 2}})));

TEST(Windows, StrategiesProgramsAndRecomputeChangeNoBit) {
  for (const char* type : {"gpt2", "untied llama"}) {
    const TrainedRun expected = train_tiny(config_of(type), 2, 5);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    models::TrainConfig c = config_of(type);
    c.sharding.strategy = "zero1";
    expect_same_bits(expected, train_tiny(c, 2, 5));
    c = config_of(type);
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, 2, 5));
    c = config_of(type);
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, 2, 5));
  }
}

// A stage's blocks have their own windows, not those of the first blocks.
TEST(Windows, StagesHaveTheirOwnBlocks) {
  for (const int64_t stages : {2, 3}) {
    models::TrainConfig c = tiny_pipeline(1);
    c.model.window = 3, c.model.full_attention_every = 2, c.model.dropout = 0;
    expect_stages_of_one_rank(c, stages);
  }
}

TEST(Windows, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  models::TrainConfig c = config_of("untied llama");
  c.train.micro_batches = 2;
  expect_planned_tapes(c, 2);
  c.sharding.context = 2;
  c.sharding.tensor = 2;
  expect_planned_tapes(c, 4);
}

}  // namespace
}  // namespace sheaf::testing
