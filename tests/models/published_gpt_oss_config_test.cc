// gpt-oss's config.json: read, written, refused, and compared with a model.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using models::ModelConfig;
using testing::config_of;
using testing::config_with;
using testing::write_text;

const std::string kDense = "tests/models/published/gpt_oss_bf16", kMxfp4 = "tests/models/published/gpt_oss_mxfp4",
                  kLlama = "tests/models/published/llama_bf16_shards", kMixtral = "tests/models/published/mixtral_bf16_shards";

TEST(PublishedGptOssConfig, IsRead) {
  for (const std::string& folder : {kDense, kMxfp4}) {
    const ModelConfig m = config_of(folder);
    EXPECT_EQ(m.type, "llama");
    EXPECT_TRUE(m.qkv_bias && m.out_bias && m.attention_sinks && m.expert_linear_bias && m.normalize_experts && !m.tie_embeddings);
    EXPECT_EQ(m.expert_gate_limit, folder == kDense ? 0.7 : 7.0);
    EXPECT_EQ(m.expert_gate_alpha, folder == kDense ? 1.5 : 1.702);
    EXPECT_EQ(m.window, 4);
    EXPECT_EQ(m.full_attention_every, 2);
    EXPECT_EQ(m.experts, 4);
    EXPECT_EQ(m.experts_per_token, 2);
    EXPECT_EQ(m.expert_hidden, folder == kDense ? 24 : 64);
    EXPECT_EQ(m.head_dim, 6);
    EXPECT_EQ(m.rope_theta, 100.0);
    EXPECT_TRUE(m.rope_scaling == (models::RopeScalingConfig{.rope_type = "yarn", .factor = 4.0, .original_max_position_embeddings = 8,
                                                             .beta_slow = 0.1, .beta_fast = 1.0, .truncate = false}));
  }
  // transformers' defaults where a file says nothing.
  const ModelConfig m = config_with(kDense, {}, {"swiglu_limit", "swiglu_alpha", "sliding_window", "layer_types", "rope_parameters", "head_dim",
                                                 "rms_norm_eps", "attention_bias", "tie_word_embeddings", "hidden_act"});
  EXPECT_EQ(m.expert_gate_limit, 7.0);
  EXPECT_EQ(m.expert_gate_alpha, 1.702);
  EXPECT_EQ(m.window, 128);
  EXPECT_EQ(m.full_attention_every, 2);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.norm_eps, 1e-5);
  EXPECT_EQ(m.rope_theta, 150000.0);
  EXPECT_TRUE(m.rope_scaling == (models::RopeScalingConfig{.rope_type = "yarn", .factor = 32.0, .original_max_position_embeddings = 4096,
                                                           .truncate = false}));
  EXPECT_FALSE(m.tie_embeddings);
  EXPECT_EQ(config_with(kMxfp4, {}, {"num_experts_per_tok"}).experts_per_token, 2);
  EXPECT_EQ(config_with(kDense, {{"num_experts", 4}}, {"num_local_experts"}).experts, 4);
}

TEST(PublishedGptOssConfig, WhatSheafDoesNotComputeIsRefused) {
  const auto refused = [](const std::string& folder, const char* key, const Json& value, const std::set<std::string>& without = {}) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { config_with(folder, {{key, value}}, without); });
  };
  const Json::Object mxfp4 = {{"quant_method", "mxfp4"}}, fp8 = {{"quant_method", "fp8"}};
  EXPECT_EQ(refused(kDense, "quantization_config", mxfp4), "no exception");  // the format is determined by the tensors' names
  EXPECT_THAT(refused(kDense, "quantization_config", fp8),
              HasSubstr("quantization_config is {\"quant_method\":\"fp8\"}: Sheaf reads FP8 in blocks"));
  EXPECT_THAT(refused(kMixtral, "quantization_config", mxfp4), HasSubstr("and experts of gpt_oss in mxfp4"));
  EXPECT_THAT(refused(kDense, "attention_bias", false), HasSubstr("attention_bias is false: gpt_oss has biases in both layers of attention"));
  EXPECT_THAT(refused(kDense, "hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(refused(kDense, "swiglu_limit", 0), HasSubstr("swiglu_limit is 0: expected a positive number"));
  EXPECT_THAT(refused(kDense, "swiglu_alpha", -1), HasSubstr("swiglu_alpha is -1: expected a positive number"));
  EXPECT_THAT(refused(kDense, "num_local_experts", Json()), HasSubstr("num_local_experts is null"));
  EXPECT_THAT(refused(kDense, "experts_per_token", 3), HasSubstr("experts_per_token is 3: num_experts_per_tok says otherwise"));
  EXPECT_THAT(refused(kDense, "sliding_window", Json()), HasSubstr("layer_types is"));
  const Json s = "sliding_attention", f = "full_attention";
  EXPECT_THAT(refused(kDense, "layer_types", Json::Array{f, s, f}), HasSubstr("full attention in every N-th layer, or in none or all"));
  EXPECT_EQ(config_with(kDense, {{"layer_types", Json::Array{s, s, f}}}).full_attention_every, 3);
  EXPECT_EQ(config_with(kDense, {{"layer_types", Json::Array{f, f, f}}}).window, 0);
  EXPECT_THAT(refused(kDense, "rope_scaling", Json::Object{{"rope_type", "dynamic"}, {"factor", 2.0}}, {"rope_parameters"}),
              HasSubstr("of the rope_type default, linear, llama3, yarn or longrope, not \"dynamic\""));
}

TEST(PublishedGptOssConfig, WhatIsWrittenIsReadAgain) {
  const auto expect_same = [](const ModelConfig& m) { testing::expect_read_again(m, models::published_config(m)); };
  ModelConfig m = config_of(kDense);
  expect_same(m);
  expect_same(config_of(kMxfp4));
  const Json json = models::published_config(m, kBF16);
  EXPECT_EQ(json.at("model_type").as_string(), "gpt_oss");
  EXPECT_EQ(json.at("architectures").dump(), R"(["GptOssForCausalLM"])");
  EXPECT_EQ(json.at("layer_types").dump(), R"(["sliding_attention","full_attention","sliding_attention"])");
  EXPECT_EQ(json.at("sliding_window"), Json(4));
  EXPECT_EQ(json.at("intermediate_size"), Json(24));
  EXPECT_EQ(json.at("swiglu_limit"), Json(0.7));
  EXPECT_FALSE(json.find("quantization_config"));
  m.rope_scaling = {};
  expect_same(m);
  m.window = 0;
  expect_same(m);
  m.window = 9, m.full_attention_every = 0;
  expect_same(m);
}

TEST(PublishedGptOssConfig, WhatNobodyHasPublishedIsNotWritten) {
  const auto refusal = [](const std::string& folder, void (*change)(ModelConfig&)) {
    ModelConfig m = config_of(folder);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m); });
  };
  const auto cannot = HasSubstr("(gpt_oss): this model cannot be written as one");
  using Change = void (*)(ModelConfig&);
  for (const Change change : {+[](ModelConfig& m) { m.qkv_bias = false; }, +[](ModelConfig& m) { m.out_bias = false; },
                              +[](ModelConfig& m) { m.attention_sinks = false; }, +[](ModelConfig& m) { m.expert_linear_bias = false; },
                              +[](ModelConfig& m) { m.expert_gate_limit = 0; }, +[](ModelConfig& m) { m.normalize_experts = false; },
                              +[](ModelConfig& m) { m.experts = 0; }, +[](ModelConfig& m) { m.qk_norm = true; },
                              +[](ModelConfig& m) { m.expert_bias = true; }, +[](ModelConfig& m) { m.expert_affinity = "sigmoid"; },
                              +[](ModelConfig& m) { m.shared_experts = 1; }, +[](ModelConfig& m) { m.dense_layers = 1; },
                              +[](ModelConfig& m) { m.gelu_gate = true; }, +[](ModelConfig& m) { m.window_rope_theta = 5; },
                              +[](ModelConfig& m) { m.rotary_dim = 4; }})
    EXPECT_THAT(refusal(kDense, change), cannot);
  for (const Change change : {+[](ModelConfig& m) { m.out_bias = true; }, +[](ModelConfig& m) { m.attention_sinks = true; }}) {
    EXPECT_THAT(refusal(kLlama, change), cannot);
    EXPECT_THAT(refusal(kMixtral, change), cannot);
  }
  EXPECT_THAT(refusal(kMixtral, [](ModelConfig& m) { m.expert_linear_bias = true; }), cannot);
  EXPECT_THAT(refusal(kMixtral, [](ModelConfig& m) { m.expert_gate_limit = 7; }), cannot);
  EXPECT_EQ(refusal(kLlama, [](ModelConfig& m) { m.expert_gate_limit = 7; }), "no exception");  // it has no experts
}

TEST(PublishedGptOssConfig, TheModelMustBeTheirs) {
  const auto message = [](const std::string& folder, void (*change)(ModelConfig&)) {
    ModelConfig m = config_of(folder);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::check_weights(models::PublishedFiles::open(folder), m); });
  };
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.out_bias = false; }), HasSubstr("model.out_bias is false, but true in"));
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.attention_sinks = false; }), HasSubstr("model.attention_sinks is false, but true in"));
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.expert_linear_bias = false; }),
              HasSubstr("model.expert_linear_bias is false, but true in"));
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.expert_gate_limit = 7; }), HasSubstr("model.expert_gate_limit is 7, but 0.7 in"));
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.expert_gate_alpha = 1; }), HasSubstr("model.expert_gate_alpha is 1, but 1.5 in"));
  EXPECT_THAT(message(kDense, [](ModelConfig& m) { m.window = 3; }), HasSubstr("model.window is 3, but 4 in"));
  EXPECT_THAT(message(kLlama, [](ModelConfig& m) { m.attention_sinks = true; }), HasSubstr("model.attention_sinks is true, but false in"));
  EXPECT_THAT(message(kLlama, [](ModelConfig& m) { m.out_bias = true; }), HasSubstr("model.out_bias is true, but false in"));
  EXPECT_THAT(message(kMixtral, [](ModelConfig& m) { m.expert_linear_bias = true; }),
              HasSubstr("model.expert_linear_bias is true, but false in"));
  EXPECT_THAT(message(kMixtral, [](ModelConfig& m) { m.expert_gate_limit = 7; }), HasSubstr("model.expert_gate_limit is 7, but 0 in"));
}

}  // namespace
}  // namespace sheaf
