// config.json of Phi-3 and Phi-4, with LongRoPE's factors: read, written and refused.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/models/published_names.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using models::ModelConfig;
using testing::config_of;
using testing::config_with;
using testing::expect_read_again;

const std::string kPhi3 = "tests/models/published/phi3_bf16", kLongrope = "tests/models/published/phi3_bf16_longrope",
                  kLlama = "tests/models/published/llama_bf16_shards", kOlmo3 = "tests/models/published/olmo3_f32";

const Json kShort = Json::Array{1.0, 1.25, 1.5}, kLong = Json::Array{1.125, 3.0, 8.5};

// The model is a Llama or a Mistral: one that was read as a Phi-3 is written as one, if it still can be.
TEST(PublishedPhi3Config, IsWrittenForWhatCameFromOne) {
  ModelConfig m = config_of(kPhi3);
  EXPECT_EQ(m.window, 6);
  EXPECT_EQ(m.full_attention_every, 0);
  EXPECT_EQ(models::published_architecture(m), "mistral");
  EXPECT_EQ(models::published_architecture(m, "phi3"), "phi3");
  EXPECT_TRUE(models::PublishedForm::to_write(m, "phi3").fused);
  EXPECT_FALSE(models::PublishedForm::to_write(m, "").fused);
  expect_read_again(m, models::published_config(m, kBF16, "phi3"));
  m.window = 0;
  expect_read_again(m, models::published_config(m, kBF16, "phi3"));
  m.rope_scaling.rope_type = "linear";
  EXPECT_EQ(models::published_architecture(m, "phi3"), "llama");
  EXPECT_FALSE(models::PublishedForm::to_write(m, "phi3").fused);
  EXPECT_EQ(models::published_architecture(config_of(kLlama), "llama"), "llama");
}

// Phi-4-mini's form: its factors in config.json, and the original context beside them.
TEST(PublishedPhi3Config, OfLongropeIsReadWrittenAndReadAgain) {
  ModelConfig m = config_of(kLongrope);
  EXPECT_EQ(m.context, 24);
  EXPECT_EQ(m.rotary_dim, 6);
  EXPECT_EQ(m.head_dim, 8);
  EXPECT_TRUE(m.tie_embeddings);
  EXPECT_TRUE(m.rope_scaling == (models::RopeScalingConfig{.rope_type = "longrope", .factor = 3.0, .original_max_position_embeddings = 8,
                                                           .short_factor = "1 1.25 1.5", .long_factor = "1.125 3 8.5"}));
  EXPECT_TRUE(models::rotary_scaling(m.rope_scaling) == RotaryScaling::longrope({1, 1.25, 1.5}, {1.125, 3, 8.5}, 3, 8));
  const Json json = models::published_config(m, kBF16, "phi3");
  const Json scaling = Json::Object{{"type", "longrope"}, {"short_factor", kShort}, {"long_factor", kLong}};
  EXPECT_EQ(json.at("model_type").as_string(), "phi3");
  EXPECT_EQ(json.at("rope_scaling"), scaling);
  EXPECT_EQ(json.at("original_max_position_embeddings"), Json(8));
  EXPECT_EQ(json.at("max_position_embeddings"), Json(24));
  EXPECT_EQ(json.at("partial_rotary_factor"), Json(0.75));
  expect_read_again(m, json);
  // No other architecture rotates a part of Llama's heads.
  EXPECT_EQ(models::published_architecture(m), "phi3");
  EXPECT_TRUE(models::PublishedForm::to_write(m, "").fused);
  // Of another context, the amplitude does not follow from the file's contexts: it is given.
  for (const int64_t context : {4, 8, 16}) {
    m.context = context;
    const Json shorter = models::published_config(m, kBF16, "phi3");
    EXPECT_EQ(shorter.at("rope_scaling").at("factor"), Json(3.0));
    EXPECT_EQ(shorter.at("rope_scaling").at("attention_factor"), Json(models::rotary_scaling(m.rope_scaling).amplitude));
    expect_read_again(m, shorter);
  }
  m.context = 24, m.rope_scaling.attention_factor = 1.5;
  expect_read_again(m, models::published_config(m, kBF16, "phi3"));
  // Whole heads are those of a Llama, too.
  m.rotary_dim = 0, m.rope_scaling.short_factor = m.rope_scaling.long_factor = "1 2 3 4";
  for (const char* type : {"phi3", "llama"}) {
    EXPECT_EQ(models::published_architecture(m, type), type);
    expect_read_again(m, models::published_config(m, kBF16, type));
  }
}

// Names and places of older files, of version 5 of transformers, and of other architectures.
TEST(PublishedPhi3Config, FormsOfLongropeAreRead) {
  const ModelConfig m = config_of(kLongrope);
  const auto expect_same = [&](const testing::Changes& changes, const std::set<std::string>& without = {}) {
    const ModelConfig read = config_with(kLongrope, changes, without);
    testing::expect_same(read, m);
    EXPECT_EQ(read.rope_scaling.rope_type, "longrope");
  };
  Json::Object scaling = {{"type", "longrope"}, {"short_factor", kShort}, {"long_factor", kLong}};
  for (const char* type : {"su", "yarn", "longrope"}) {
    scaling[0].second = type;
    expect_same({{"rope_scaling", scaling}});
  }
  scaling[0].first = "rope_type";
  Json inside = scaling;
  inside.set("original_max_position_embeddings", 8);
  expect_same({{"rope_scaling", inside}}, {"original_max_position_embeddings"});
  inside.set("rope_theta", 100.0).set("partial_rotary_factor", 0.75).set("factor", Json()).set("attention_factor", Json());
  expect_same({{"rope_parameters", inside}}, {"rope_scaling", "rope_theta", "partial_rotary_factor"});
  EXPECT_EQ(config_with(kLongrope, {{"max_position_embeddings", 4}}).rope_scaling.factor, 1.0);

  const Json of_head = Json::Object{{"rope_type", "longrope"}, {"short_factor", Json::Array{1, 2}}, {"long_factor", Json::Array{3, 4.5}},
                                    {"original_max_position_embeddings", 5}, {"factor", 2.0}, {"rope_theta", 500.0}};
  ModelConfig llama = config_with(kLlama, {{"rope_parameters", of_head}});
  EXPECT_EQ(llama.rope_scaling.long_factor, "3 4.5");
  EXPECT_EQ(llama.rope_scaling.factor, 2.0);
  expect_read_again(llama, models::published_config(llama));
  // Gemma's classes of transformers read no other key. Phi-3's of version 4 read "type" alone.
  EXPECT_EQ(models::published_config(llama).at("rope_scaling").at("rope_type").as_string(), "longrope");
  EXPECT_EQ(models::published_config(config_of(kLongrope)).at("rope_scaling").at("type").as_string(), "longrope");
  EXPECT_EQ(models::published_config(config_of(kLongrope)).at("pad_token_id"), Json()) << "Phi-3's own is 32000";
  const Json window = Json::Object{{"rope_type", "default"}, {"rope_theta", 500.0}};
  ModelConfig olmo = config_with(kOlmo3, {{"rope_parameters", Json::Object{{"full_attention", of_head}, {"sliding_attention", window}}}});
  EXPECT_EQ(olmo.rope_scaling.rope_type, "longrope");
  expect_read_again(olmo, models::published_config(olmo));
}

TEST(PublishedPhi3Config, LongropeIsAsTransformersHasIt) {
  const Json cases = Json::parse(testing::text_of("tests/models/published/longrope.json"), "longrope.json");
  EXPECT_EQ(cases.as_array().size(), 7u);
  for (const Json& c : cases.as_array()) {
    SCOPED_TRACE(c.dump());
    testing::Changes changes = {{"partial_rotary_factor", 1.0}};
    for (const char* key : {"max_position_embeddings", "original_max_position_embeddings", "rope_scaling"}) changes.emplace_back(key, c.at(key));
    const ModelConfig m = config_with(kLongrope, changes);
    const RotaryScaling scaling = models::rotary_scaling(m.rope_scaling).for_context(c.at("length").as_int());
    EXPECT_NEAR(scaling.amplitude, c.at("attention_factor").as_double(), 1e-15);
    const RotaryFrequencies frequencies(m.rope_theta, 4, scaling);
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_NEAR(frequencies(i) / c.at("frequencies").as_array()[static_cast<size_t>(i)].as_double(), 1.0, 1e-6) << i;
    expect_read_again(m, models::published_config(m, kBF16, "phi3"));
  }
}

TEST(PublishedPhi3Config, ImpossibleLongropeIsRefused) {
  const auto refused = [](const testing::Changes& changes, const std::set<std::string>& without = {}) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { config_with(kLongrope, changes, without); });
  };
  const auto with = [&](const char* name, const Json& value) {
    Json scaling = Json::Object{{"type", "longrope"}, {"short_factor", kShort}, {"long_factor", kLong}};
    scaling.set(name, value);
    return refused({{"rope_scaling", scaling}});
  };
  const Json scaling = Json::Object{{"type", "longrope"}, {"long_factor", kLong}};
  EXPECT_THAT(refused({{"rope_scaling", scaling}}),
              HasSubstr("rope_scaling is {\"type\":\"longrope\",\"long_factor\":[1.125,3.0,8.5]}: short_factor is missing"));
  for (const Json& list : {Json(), Json(1.5), Json("1 2 3"), Json(Json::Array{1, "2", 3})})
    EXPECT_THAT(with("long_factor", list), HasSubstr("long_factor is not a list of numbers"));
  EXPECT_THAT(with("long_factor", Json::Array{1, 2}),
              HasSubstr("long_factor has 2 numbers: expected one for each of the 3 pairs of a head's rotated elements"));
  EXPECT_THAT(with("short_factor", Json::Array{1, 0, 2}), HasSubstr("short_factor[1] is 0: expected a positive number up to"));
  EXPECT_THAT(with("factor", 0.5), HasSubstr("factor is 0.5: expected a number from 1 to"));
  EXPECT_THAT(with("attention_factor", 0), HasSubstr("attention_factor is 0: expected a positive number"));
  EXPECT_THAT(with("original_max_position_embeddings", 9), HasSubstr("original_max_position_embeddings is 8: rope_scaling says otherwise"));
  EXPECT_THAT(with("long_mscale", 1.25), HasSubstr("long_mscale: Sheaf's longrope has one attention_factor"));
  EXPECT_THAT(with("type", "dynamic"), HasSubstr("not \"dynamic\""));
  EXPECT_THAT(refused({}, {"original_max_position_embeddings"}), HasSubstr("original_max_position_embeddings is missing"));
  // As many factors as the heads have rotated pairs.
  EXPECT_THAT(refused({}, {"partial_rotary_factor"}), HasSubstr("short_factor has 3 numbers: expected one for each of the 4 pairs"));
  EXPECT_THAT(refused({{"partial_rotary_factor", 0.4}}), HasSubstr("partial_rotary_factor is 0.4: rotary positions turn pairs"));

  const auto unpublished = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig m = config_of(kLongrope);
    change(m);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m, kBF16, "phi3"); });
  };
  for (const auto& change : {+[](ModelConfig& m) { m.rope_scaling.rope_type = "yarn"; }, +[](ModelConfig& m) { m.qkv_bias = true; },
                             +[](ModelConfig& m) { m.qk_norm = true; }, +[](ModelConfig& m) { m.experts = 2; },
                             +[](ModelConfig& m) { m.head_dim = 16; }, +[](ModelConfig& m) { m.window = 4, m.full_attention_every = 2; }})
    EXPECT_THAT(unpublished(change), HasSubstr("model.rotary_dim 6: published with mixtures as DeepSeek-V3's"));
}

}  // namespace
}  // namespace sheaf
