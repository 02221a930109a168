// config.json of OLMo 2, OLMo 3, OLMoE and Gemma 2: read, written and refused.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using models::ModelConfig;
using testing::Changes;
using testing::config_of;
using testing::config_with;
using testing::expect_read_again;

const std::string kOlmo2 = "tests/models/published/olmo2_bf16", kOlmo3 = "tests/models/published/olmo3_f32",
                  kOlmoe = "tests/models/published/olmoe_bf16", kGemma2 = "tests/models/published/gemma2_bf16",
                  kLlama = "tests/models/published/llama_bf16_shards", kGemma3 = "tests/models/published/gemma3_bf16";

TEST(PublishedOlmoConfig, IsRead) {
  const ModelConfig two = config_of(kOlmo2), three = config_of(kOlmo3), mixture = config_of(kOlmoe);
  for (const ModelConfig& m : {two, three, mixture}) {
    EXPECT_TRUE(m.qk_norm && m.qk_norm_all_heads && !m.tie_embeddings && !m.qkv_bias);
    EXPECT_EQ(m.rope_theta, 500.0);
    EXPECT_EQ(m.pre_norms, m.experts > 0);
    EXPECT_EQ(m.post_norms, m.experts == 0);
  }
  EXPECT_EQ(two.window, 0);
  EXPECT_EQ(three.window, 5);
  EXPECT_EQ(three.full_attention_every, 2);
  EXPECT_EQ(three.window_rope_theta, 500.0);
  EXPECT_EQ(three.rope_scaling.attention_factor, 1.25);
  EXPECT_EQ(mixture.experts, 5);
  EXPECT_EQ(mixture.experts_per_token, 2);
  EXPECT_EQ(mixture.expert_hidden, 8);
  EXPECT_FALSE(mixture.normalize_experts);
}

// transformers' defaults where a file says nothing, and OLMo 3 as written by its version 4.
TEST(PublishedOlmoConfig, OfFewerKeysIsRead) {
  const std::set<std::string> left_out = {"rope_theta", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "attention_bias"};
  const ModelConfig two = config_with(kOlmo2, {}, left_out);
  EXPECT_EQ(two.kv_heads, 4);
  EXPECT_EQ(two.norm_eps, 1e-5);
  EXPECT_EQ(two.rope_theta, 10000.0);
  EXPECT_FALSE(two.tie_embeddings);
  const ModelConfig three = config_with(kOlmo3, {}, {"rope_parameters", "layer_types", "sliding_window"});
  EXPECT_EQ(three.window, 4096);
  EXPECT_EQ(three.full_attention_every, 4);
  EXPECT_TRUE(three.rope_theta == 500000.0 && three.window_rope_theta == 500000.0);
  const Json yarn = Json::Object{{"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 16}};
  const ModelConfig before = config_with(kOlmo3, {{"rope_theta", 1e4}, {"rope_scaling", yarn}}, {"rope_parameters"});
  EXPECT_TRUE(before.rope_theta == 1e4 && before.window_rope_theta == 1e4);
  EXPECT_EQ(before.rope_scaling.rope_type, "yarn");
}

TEST(PublishedOlmoConfig, WhatSheafDoesNotComputeIsRefused) {
  const auto refused = [](const std::string& folder, const char* key, const Json& value) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { config_with(folder, {{key, value}}); });
  };
  EXPECT_THAT(refused(kOlmoe, "clip_qkv", 8.0), HasSubstr("clip_qkv is 8.0: Sheaf's queries, keys and values are not clipped"));
  EXPECT_THAT(refused(kOlmo2, "sliding_window", 4096), HasSubstr("sliding_window is 4096: attention of olmo2 sees all tokens before"));
  EXPECT_THAT(refused(kOlmo2, "attention_bias", true), HasSubstr("attention_bias is true"));
  EXPECT_THAT(refused(kOlmo3, "rope_parameters", Json::Object{{"rope_type", "default"}, {"rope_theta", 1e4}}),
              HasSubstr("expected full_attention and sliding_attention"));
}

TEST(PublishedOlmoConfig, IsWrittenAndReadAgain) {
  for (const auto& [folder, type, name] : {std::tuple{kOlmo2, "olmo2", "Olmo2ForCausalLM"}, {kOlmo3, "olmo3", "Olmo3ForCausalLM"},
                                           {kOlmoe, "olmoe", "OlmoeForCausalLM"}}) {
    ModelConfig m = config_of(folder);
    const Json json = models::published_config(m);
    EXPECT_EQ(json.at("model_type").as_string(), type);
    EXPECT_EQ(json.at("architectures").as_array()[0].as_string(), name);
    expect_read_again(m, json);
    m.rope_theta = 77.0;
    expect_read_again(m, models::published_config(m));
  }
  // All blocks with a window; unscaled frequencies.
  ModelConfig m = config_of(kOlmo3);
  m.full_attention_every = 0;
  expect_read_again(m, models::published_config(m));
  m.rope_scaling = {};
  m.window_rope_theta = 30.0;
  expect_read_again(m, models::published_config(m));
}

TEST(PublishedOlmoConfig, WhatNobodyPublishesIsRefused) {
  const auto refused = [](const std::string& folder, const std::function<void(ModelConfig&)>& change) {
    ModelConfig m = config_of(folder);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m); });
  };
  for (const auto& change : {+[](ModelConfig& m) { m.qk_norm_all_heads = false; }, +[](ModelConfig& m) { m.pre_norms = true; },
                             +[](ModelConfig& m) { m.qkv_bias = true; }, +[](ModelConfig& m) { m.gelu_gate = true; },
                             +[](ModelConfig& m) { m.nope_every = 2; }, +[](ModelConfig& m) { m.rotary_dim = 2; },
                             +[](ModelConfig& m) { m.attention_gate = true; }, +[](ModelConfig& m) { m.attention_sinks = true; },
                             +[](ModelConfig& m) { m.experts = 4; }})
    for (const std::string& folder : {kOlmo2, kOlmo3}) EXPECT_THAT(refused(folder, change), HasSubstr("cannot be written as one"));
  EXPECT_THAT(refused(kOlmo3, [](ModelConfig& m) { m.window_rope_theta = 0; }), HasSubstr("whose blocks have model.window_rope_theta, olmo3"));
  EXPECT_THAT(refused(kOlmoe, [](ModelConfig& m) { m.post_norms = true; }), HasSubstr("olmoe"));
  EXPECT_THAT(refused(kOlmoe, [](ModelConfig& m) { m.expert_bias = true; }), HasSubstr("olmoe"));
  EXPECT_THAT(refused(kOlmoe, [](ModelConfig& m) { m.head_dim *= 2; }), HasSubstr("heads that are together as wide as the model (olmoe)"));
  EXPECT_THAT(refused(kGemma3, [](ModelConfig& m) { m.pre_norms = false; }), HasSubstr("cannot be written as one"));
}

TEST(PublishedGemma2Config, IsReadWrittenAndReadAgain) {
  ModelConfig m = config_of(kGemma2);
  EXPECT_TRUE(m.post_norms && m.pre_norms && m.gelu_gate && m.scale_embedding && m.tie_embeddings && !m.qk_norm);
  EXPECT_EQ(m.attn_logit_softcapping, 1.5);
  EXPECT_EQ(m.final_logit_softcapping, 2.5);
  EXPECT_EQ(m.query_pre_attn_scalar, 9);
  EXPECT_EQ(m.window, 4);
  EXPECT_EQ(m.full_attention_every, 2);
  EXPECT_EQ(m.window_rope_theta, 0);
  EXPECT_EQ(config_of("tests/models/published/gemma2_f32_version_4").final_logit_softcapping, 0);
  const ModelConfig least = config_with(kGemma2, {}, {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window",
                                                      "layer_types", "head_dim", "tie_word_embeddings", "rms_norm_eps"});
  EXPECT_TRUE(least.attn_logit_softcapping == 50 && least.final_logit_softcapping == 30 && least.tie_embeddings && least.norm_eps == 1e-6);
  EXPECT_TRUE(least.head_dim == 256 && least.query_pre_attn_scalar == 0 && least.window == 4096 && least.full_attention_every == 2);
  const Json json = models::published_config(m);
  EXPECT_EQ(json.at("model_type").as_string(), "gemma2");
  expect_read_again(m, json);
  m.attn_logit_softcapping = m.final_logit_softcapping = 0;
  expect_read_again(m, models::published_config(m));
  m.window = m.full_attention_every = 0;
  expect_read_again(m, models::published_config(m));
  for (const Json& wrong : {Json(0.0), Json(-1.0), Json("50")})
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { config_with(kGemma2, {{"attn_logit_softcapping", wrong}}); }),
                HasSubstr("attn_logit_softcapping"));
  for (const std::string& folder : {kLlama, kGemma3, kOlmo2, kOlmoe}) {
    ModelConfig capped = config_of(folder);
    capped.final_logit_softcapping = 30;
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(capped); }), HasSubstr("cannot be written as one"));
  }
}

}  // namespace
}  // namespace sheaf
