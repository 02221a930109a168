// Qwen3-Next's config.json: read, written, refused, and compared with a model.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using models::ModelConfig;
using testing::Changes;
using testing::config_of;
using testing::config_with;
using testing::text_of;
using testing::write_text;

const std::string kNext = "tests/models/published/qwen3_next_bf16", kMoe = "tests/models/published/qwen3_moe_bf16",
                  kDots1 = "tests/models/published/dots1_bf16";

ModelConfig read_with(const Changes& changes, const std::set<std::string>& without = {}) { return config_with(kNext, changes, without); }

TEST(PublishedQwen3NextConfig, IsRead) {
  const ModelConfig m = config_of(kNext);
  EXPECT_EQ(m.type, "llama");
  EXPECT_TRUE(m.qk_norm && m.attention_gate && m.shared_expert_gate && m.normalize_experts);
  EXPECT_FALSE(m.tie_embeddings || m.qkv_bias || m.out_bias);
  EXPECT_EQ(m.full_attention_every, 3);
  EXPECT_EQ(m.linear_key_heads, 2);
  EXPECT_EQ(m.linear_value_heads, 6);
  EXPECT_EQ(m.linear_key_head_dim, 10);
  EXPECT_EQ(m.linear_value_head_dim, 9);
  EXPECT_EQ(m.linear_conv_kernel, 3);
  EXPECT_EQ(m.head_dim, 16);
  EXPECT_EQ(m.rotary_dim, 4);
  EXPECT_EQ(m.rope_theta, 100.0);
  EXPECT_EQ(m.experts, 5);
  EXPECT_EQ(m.experts_per_token, 2);
  EXPECT_EQ(m.expert_hidden, 6);
  EXPECT_EQ(m.shared_experts, 2);
  EXPECT_EQ(m.norm_eps, 1e-6);
}

// With the keys of version 4 of transformers, which the published files have.
TEST(PublishedQwen3NextConfig, OfVersion4IsRead) {
  const std::set<std::string> later = {"rope_parameters", "layer_types"};
  const ModelConfig m = read_with({{"rope_theta", 1e7}, {"rope_scaling", Json()}, {"partial_rotary_factor", 0.5},
                                   {"full_attention_interval", 2}, {"use_sliding_window", false}, {"tie_word_embeddings", true}}, later);
  EXPECT_EQ(m.rope_theta, 1e7);
  EXPECT_EQ(m.rotary_dim, 8);
  EXPECT_EQ(m.full_attention_every, 2);
  EXPECT_TRUE(m.tie_embeddings);
  // transformers' defaults where a file says nothing.
  const ModelConfig least =
      read_with({}, {"rope_parameters", "layer_types", "head_dim", "norm_topk_prob", "rms_norm_eps", "mlp_only_layers",
                     "decoder_sparse_step", "hidden_act", "attention_bias", "tie_word_embeddings"});
  EXPECT_EQ(least.full_attention_every, 4);
  EXPECT_EQ(least.head_dim, 256);
  EXPECT_EQ(least.rotary_dim, 64);
  EXPECT_EQ(least.rope_theta, 10000.0);
  EXPECT_TRUE(least.normalize_experts && !least.tie_embeddings);
}

TEST(PublishedQwen3NextConfig, ThePartOfAHeadThatIsRotated) {
  const auto rotated = [](const Json& factor) {
    return read_with({{"rope_parameters", Json::Object{{"partial_rotary_factor", factor}}}}).rotary_dim;
  };
  EXPECT_EQ(rotated(0.5), 8);
  EXPECT_EQ(rotated(0.4), 6);  // cut to a whole number
  EXPECT_EQ(rotated(1.0), 0);  // all
  EXPECT_EQ(rotated(1), 0);
  const auto refused = [](const Json& factor) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { read_with({{"partial_rotary_factor", factor}}, {"rope_parameters"}); });
  };
  EXPECT_THAT(refused(0.2), AllOf(HasSubstr("partial_rotary_factor is 0.2: rotary positions turn pairs, of all 16 elements of a head or"),
                                  HasSubstr("the first of them, not 0.2 of them")));
  for (const Json& factor : {Json(0.0), Json(-0.5), Json(1.5), Json(0.05)}) EXPECT_THAT(refused(factor), HasSubstr("turn pairs"));
  EXPECT_THAT(refused("all"), HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData,
                                          [] { read_with({{"rope_parameters", Json::Object{{"partial_rotary_factor", "all"}}}}); }),
              HasSubstr("partial_rotary_factor is not a number"));
}

TEST(PublishedQwen3NextConfig, LayersWithFullAttention) {
  const Json l = "linear_attention", f = "full_attention";
  const auto every = [](const Json::Array& types) { return read_with({{"layer_types", types}}).full_attention_every; };
  EXPECT_EQ(every({l, f, l, f}), 2);
  EXPECT_EQ(every({l, l, l, f}), 4);
  EXPECT_EQ(every({l, l, l, l}), 0);
  const auto refused = [&](const Json& types) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { read_with({{"layer_types", types}}); });
  };
  const auto uneven = HasSubstr("layer_types is");
  for (const Json::Array& types : {Json::Array{l, f, l, l}, {l, f, f, l}, {f, l, f, l}, {l, l, l, "sliding_attention"}})
    EXPECT_THAT(refused(types), AllOf(uneven, HasSubstr("in all layers, or in all but each N-th")));
  EXPECT_THAT(refused(Json::Array{f, f, f, f}), AllOf(uneven, HasSubstr("no layer has linear attention")));
  EXPECT_THAT(refused(Json::Array{l, l, f}), AllOf(uneven, HasSubstr("expected an array with the type of each layer")));
  EXPECT_THAT(refused("linear_attention"), HasSubstr("expected an array"));
  const auto interval = [](int64_t n) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { read_with({{"full_attention_interval", n}}, {"layer_types"}); });
  };
  EXPECT_THAT(interval(1), HasSubstr("full_attention_interval is 1: no layer has linear attention"));
  EXPECT_THAT(interval(0), HasSubstr("full_attention_interval is 0: expected a positive integer"));
}

TEST(PublishedQwen3NextConfig, WhatSheafDoesNotComputeIsRefused) {
  const auto refused = [](const char* key, const Json& value) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { read_with({{key, value}}); });
  };
  EXPECT_EQ(refused("use_sliding_window", false), "no exception");
  EXPECT_THAT(refused("use_sliding_window", true), HasSubstr("use_sliding_window is true: full attention of qwen3_next sees all"));
  EXPECT_THAT(refused("attention_bias", true), HasSubstr("attention_bias is true"));
  EXPECT_THAT(refused("hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(refused("shared_expert_intermediate_size", 8),
              HasSubstr("shared_expert_intermediate_size is 8: expected a multiple of moe_intermediate_size, 6"));
  EXPECT_THAT(refused("shared_expert_intermediate_size", 0), HasSubstr("shared_expert_intermediate_size is 0"));
  EXPECT_THAT(refused("linear_num_value_heads", 5), HasSubstr("linear_num_value_heads is 5: expected a multiple of the 2 key heads"));
  EXPECT_THAT(refused("decoder_sparse_step", 2), HasSubstr("decoder_sparse_step is 2: Sheaf's layers all have experts, or none"));
  EXPECT_THAT(refused("mlp_only_layers", Json::Array{1}), HasSubstr("mlp_only_layers is [1]: Sheaf's layers all have"));
  EXPECT_THAT(refused("num_experts", 0), HasSubstr("num_experts is 0"));
  for (const char* key : {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                          "linear_conv_kernel_dim"})
    for (const Json& value : {Json(), Json(0)})
      EXPECT_THAT(refused(key, value), HasSubstr(str(key, " is ", value.dump(), ": expected a positive integer")));
  EXPECT_THAT(refused("rope_parameters", Json::Object{{"rope_type", "dynamic"}, {"factor", 2.0}}), HasSubstr("not \"dynamic\""));
}

TEST(PublishedQwen3NextConfig, WhatIsWrittenIsReadAgain) {
  const auto expect_same = [](const ModelConfig& m) { testing::expect_read_again(m, models::published_config(m)); };
  ModelConfig m = config_of(kNext);
  expect_same(m);
  const Json json = models::published_config(m, kBF16), theirs = Json::parse(text_of(kNext + "/config.json"), "config.json");
  EXPECT_EQ(json.at("partial_rotary_factor"), Json(0.25));
  for (const char* key : {"model_type", "architectures", "layer_types", "linear_num_key_heads", "linear_num_value_heads",
                          "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
                          "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "attention_bias",
                          "head_dim", "intermediate_size", "hidden_act", "tie_word_embeddings"})
    EXPECT_EQ(json.at(key), theirs.at(key)) << key;
  m.full_attention_every = 0, m.tie_embeddings = true, m.normalize_experts = false;
  m.rope_scaling = {.rope_type = "yarn", .factor = 4.0, .original_max_position_embeddings = 8};
  expect_same(m);
  // Whatever part of a head is rotated: the written factor, multiplied by the width and truncated, gives it back.
  for (m.head_dim = 2; m.head_dim <= 256; m.head_dim += 2)
    for (m.rotary_dim = 0; m.rotary_dim < m.head_dim; m.rotary_dim += 2) {
      const double part = models::published_config(m).at("partial_rotary_factor").as_double();
      const int64_t rotated = m.rotary_dim ? m.rotary_dim : m.head_dim;
      ASSERT_EQ(static_cast<int64_t>(part * static_cast<double>(m.head_dim)), rotated) << m.head_dim;
    }
}

TEST(PublishedQwen3NextConfig, WhatNobodyHasPublishedIsNotWritten) {
  const auto refusal = [](const std::string& folder, void (*change)(ModelConfig&)) {
    ModelConfig m = config_of(folder);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m); });
  };
  const auto cannot = HasSubstr("Gemma's or gpt-oss's: this model cannot be written as one");
  using Change = void (*)(ModelConfig&);
  for (const Change change : {+[](ModelConfig& m) { m.linear_key_heads = 0; }, +[](ModelConfig& m) { m.attention_gate = false; },
                              +[](ModelConfig& m) { m.qk_norm = false; }, +[](ModelConfig& m) { m.shared_expert_gate = false; },
                              +[](ModelConfig& m) { m.shared_experts = 0; },
                              +[](ModelConfig& m) { m.dense_layers = 1; }, +[](ModelConfig& m) { m.expert_bias = true; },
                              +[](ModelConfig& m) { m.expert_affinity = "sigmoid"; }, +[](ModelConfig& m) { m.expert_scale = 2; },
                              +[](ModelConfig& m) { m.routing_groups = 5; }, +[](ModelConfig& m) { m.qkv_bias = true; },
                              +[](ModelConfig& m) { m.out_bias = true; }, +[](ModelConfig& m) { m.attention_sinks = true; },
                              +[](ModelConfig& m) { m.gelu_gate = true; }, +[](ModelConfig& m) { m.post_norms = true; },
                              +[](ModelConfig& m) { m.window = 5; }})
    EXPECT_THAT(refusal(kNext, change), cannot);
  for (const Change change : {+[](ModelConfig& m) { m.attention_gate = true; }, +[](ModelConfig& m) { m.linear_key_heads = 2; }})
    EXPECT_THAT(refusal(kMoe, change), cannot);
  EXPECT_THAT(refusal(kMoe, [](ModelConfig& m) { m.rotary_dim = 2; }), HasSubstr("model.rotary_dim 2: published with mixtures as DeepSeek-V3's"));
  EXPECT_THAT(refusal(kDots1, [](ModelConfig& m) { m.shared_expert_gate = true; }), cannot);
  EXPECT_EQ(refusal(kNext, [](ModelConfig& m) { m.rotary_dim = 0; }), "no exception");
}

TEST(PublishedQwen3NextConfig, TheModelMustBeTheirs) {
  const auto message = [](const std::string& folder, void (*change)(ModelConfig&)) {
    ModelConfig m = config_of(folder);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::check_weights(models::PublishedFiles::open(folder), m); });
  };
  EXPECT_EQ(message(kNext, [](ModelConfig&) {}), "no exception");
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.attention_gate = false; }), HasSubstr("model.attention_gate is false, but true in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.rotary_dim = 0; }), HasSubstr("model.rotary_dim is 0, but 4 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.full_attention_every = 2; }), HasSubstr("model.full_attention_every is 2, but 3 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.linear_key_heads = 3; }), HasSubstr("model.linear_key_heads is 3, but 2 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.linear_value_heads = 4; }), HasSubstr("model.linear_value_heads is 4, but 6 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.linear_key_head_dim = 4; }), HasSubstr("model.linear_key_head_dim is 4, but 10 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.linear_value_head_dim = 5; }), HasSubstr("model.linear_value_head_dim is 5, but 9 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.linear_conv_kernel = 4; }), HasSubstr("model.linear_conv_kernel is 4, but 3 in"));
  EXPECT_THAT(message(kNext, [](ModelConfig& m) { m.shared_expert_gate = false; }),
              HasSubstr("model.shared_expert_gate is false, but true in"));
  EXPECT_THAT(message(kMoe, [](ModelConfig& m) { m.linear_key_heads = 2; }), HasSubstr("model.linear_key_heads is 2, but 0 in"));
}

}  // namespace
}  // namespace sheaf
