// Text models that are published inside image models: Qwen3.5's and Gemma 3's; their config.json, and their names.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/models/presets.h"
#include "sheaf/models/published_names.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using models::ModelConfig;
using testing::Copy;
using testing::config_of;
using testing::text_of;
using testing::write_text;
using Tensors = std::map<std::string, Copy::Stored>;

const std::string kQwen = "tests/models/published/qwen3_5_bf16_images", kMoe = "tests/models/published/qwen3_5_moe_bf16",
                  kNext = "tests/models/published/qwen3_next_bf16", kGemma = "tests/models/published/gemma3_bf16_images",
                  kMistral = "tests/models/published/mistral_f32_window";

ModelConfig read(const std::string& text) {
  const ScratchFolder folder;
  write_text(folder / "config.json", text);
  return models::read_published_config(folder / "config.json");
}
std::string refusal(const std::string& text) {
  return message_of<CheckpointError>(ExitCode::kData, [&] { read(text); });
}

/// A folder's config.json with this key of its text_config, or of the top level, changed.
std::string with(const std::string& folder, const char* key, const Json& value, bool of_text = true) {
  Json whole = Json::parse(text_of(folder + "/config.json"), "config.json");
  if (!of_text) return whole.set(key, value).dump();
  Json text = whole.at("text_config");
  text.set(key, value);
  return whole.set("text_config", text).dump();
}

TEST(PublishedImages, TheModelOfTextIsRead) {
  const ModelConfig m = config_of(kQwen);
  EXPECT_TRUE(m.type == "llama" && m.qk_norm && m.attention_gate && m.tie_embeddings);
  EXPECT_EQ(m.experts, 0);
  EXPECT_EQ(m.mlp_width, 24);
  EXPECT_EQ(m.full_attention_every, 3);
  EXPECT_EQ(m.linear_value_heads, 6);
  EXPECT_EQ(m.rotary_dim, 4);
  EXPECT_EQ(m.rope_theta, 100.0);
  EXPECT_EQ(models::published_type(kQwen + "/config.json"), "qwen3_5_text");
  EXPECT_EQ(models::published_type(kMoe + "/config.json"), "qwen3_5_moe_text");
  const ModelConfig moe = config_of(kMoe);
  EXPECT_TRUE(moe.shared_expert_gate && moe.normalize_experts && !moe.tie_embeddings);
  EXPECT_EQ(moe.experts, 5);
  EXPECT_EQ(moe.shared_experts, 2);
  const ModelConfig gemma = config_of(kGemma);
  EXPECT_EQ(gemma.query_pre_attn_scalar, 9);
  EXPECT_EQ(gemma.full_attention_every, 3);
  EXPECT_TRUE(gemma.tie_embeddings && gemma.post_norms);
}

// The keys of gemma-3-4b-it and 27b-it, which leave out transformers' defaults.
TEST(PublishedImages, Gemma3AsItIsPublished) {
  const ModelConfig small = read(R"({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
      "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
      "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, "vision_config": {"hidden_size": 1152}})");
  testing::expect_same(small, models::resolved(models::presets().at("gemma3-4b")));
  const ModelConfig large = read(R"({"model_type": "gemma3", "text_config": {"head_dim": 128, "hidden_size": 5376,
      "intermediate_size": 21504, "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
      "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}})");
  testing::expect_same(large, models::resolved(models::presets().at("gemma3-27b")));
  EXPECT_EQ(large.query_pre_attn_scalar, 168);
}

// Scores are divided by the root of 9, not by that of a head's width, 6: the key is read, and changes the results.
TEST(PublishedImages, ScoresAreDividedOtherwise) {
  const auto logits = [](int64_t divisor) {
    ModelConfig m = config_of(kGemma);
    m.query_pre_attn_scalar = divisor;
    const auto model = models::make_language_model(m, 0);
    materialize(*model, Device::cpu(), {.dtype = kF64});
    const auto files = models::PublishedFiles::open(kGemma);
    models::fill_weights(nn::state_pieces(*model), files, m);
    return model->logits(Tensor::from(std::vector<int32_t>{3, 1, 4, 1, 5}, {1, 5})).to_vector<double>();
  };
  EXPECT_EQ(logits(0), logits(6));
  EXPECT_NE(logits(0), logits(9));
  ModelConfig other = config_of(kGemma);
  other.query_pre_attn_scalar = 0;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::check_weights(models::PublishedFiles::open(kGemma), other); }),
              HasSubstr("model.query_pre_attn_scalar is 0, but 9 in"));
}

TEST(PublishedImages, Mistrals) {
  const Json text = Json::parse(text_of(kMistral + "/config.json"), "config.json");
  const ModelConfig m = read(Json(Json::Object{{"model_type", "mistral3"}, {"text_config", text}}).dump());
  testing::expect_same(m, config_of(kMistral));
}

TEST(PublishedImages, WhatSheafDoesNotComputeIsRefused) {
  EXPECT_THAT(refusal(with(kQwen, "model_type", "qwen3_text")),
              AllOf(HasSubstr("config.json: text_config: model_type is \"qwen3_text\": of qwen3_5 Sheaf has the text model qwen3_5_text")));
  EXPECT_THAT(refusal(with(kQwen, "hidden_act", "gelu")), HasSubstr("text_config: hidden_act is \"gelu\""));
  EXPECT_THAT(refusal(with(kQwen, "attn_output_gate", false)), HasSubstr("attn_output_gate is false: attention of qwen3_5_text has gates"));
  EXPECT_THAT(refusal(with(kQwen, "use_sliding_window", true)), HasSubstr("full attention of qwen3_5_text sees all tokens before"));
  EXPECT_THAT(refusal(with(kQwen, "text_config", Json(3), false)), HasSubstr("text_config is 3: expected an object"));
  EXPECT_THAT(refusal(R"({"model_type": "qwen3_5"})"), HasSubstr("text_config is missing: expected an object"));
  EXPECT_THAT(refusal(with(kGemma, "final_logit_softcapping", 30.0)), HasSubstr("Sheaf's logits are not capped"));
  EXPECT_THAT(refusal(with(kMoe, "norm_topk_prob", false, false)), HasSubstr("has weights that add up to 1"));
}

TEST(PublishedImages, WhatIsWrittenIsReadAgain) {
  const auto written = [](const ModelConfig& m, const std::string& like) {
    const Json json = models::published_config(m, kBF16, like);
    testing::expect_read_again(m, json);
    return json.at("model_type").as_string();
  };
  EXPECT_EQ(written(config_of(kQwen), ""), "qwen3_5_text");
  EXPECT_EQ(written(config_of(kGemma), ""), "gemma3_text");
  // Qwen3-Next's mixtures and Qwen3.5's are the same: a model is written in the form it came from.
  EXPECT_EQ(written(config_of(kMoe), "qwen3_5_moe_text"), "qwen3_5_moe_text");
  EXPECT_EQ(written(config_of(kMoe), ""), "qwen3_next");
  EXPECT_EQ(written(config_of(kNext), "qwen3_next"), "qwen3_next");
  EXPECT_TRUE(models::PublishedForm::to_write(config_of(kMoe), "qwen3_5_moe_text").linear_apart);
  EXPECT_FALSE(models::PublishedForm::to_write(config_of(kMoe), "").linear_apart);
  EXPECT_TRUE(models::PublishedForm::to_write(config_of(kQwen), "qwen3_next").linear_apart);
}

// Tensors of the image part are skipped; all tensors of the text part must be known.
TEST(PublishedImages, TensorsThatDoNotFit) {
  const auto refused = [](const std::string& folder, const std::function<void(Tensors&)>& edit) {
    const Copy broken(folder);
    broken.rewrite(edit);
    return broken.refused();
  };
  for (const auto& [folder, prefix] : {std::pair(kQwen, "model.language_model."), std::pair(kGemma, "language_model.model.")}) {
    const std::string p = prefix;
    EXPECT_EQ(refused(folder, [](Tensors&) {}), "no exception");
    EXPECT_EQ(refused(folder, [&](Tensors& t) { t["model.visual.more"] = t.at(p + "norm.weight"); }), "no exception");
    EXPECT_THAT(refused(folder, [&](Tensors& t) { t[p + "layers.0.more"] = t.at(p + "norm.weight"); }),
                HasSubstr(p + "layers.0.more\" bf16[1"));
    EXPECT_THAT(refused(folder, [&](Tensors& t) { t.erase(p + "norm.weight"); }), HasSubstr("has no \"" + p + "norm.weight\""));
  }
  EXPECT_THAT(refused(kMoe, [](Tensors& t) { t.at("model.layers.1.mlp.experts.gate_up_proj").shape = {5, 14, 12}; }),
              HasSubstr("asks for [5,12,14]"));
  EXPECT_THAT(refused(kMoe, [](Tensors& t) { t.erase("model.layers.1.linear_attn.in_proj_z.weight"); }), HasSubstr("has no \"model.layers.1."));
}

// Joined matrices of experts, or separate ones, give the same parameters; and so do Qwen3-Next's names and Qwen3.5's.
TEST(PublishedImages, JoinedExpertsAreThoseOfEach) {
  const Copy apart(kMoe);
  apart.rewrite([](Tensors& t) {
    for (int64_t layer = 0; layer < 4; ++layer) {
      const std::string experts = str("model.layers.", layer, ".mlp.experts.");
      const auto take = [&](const std::string& name, int64_t matrix, int64_t first, int64_t rows) {
        const Copy::Stored& all = t.at(experts + name);
        const auto row = static_cast<ptrdiff_t>(all.shape[2]) * 2, begin = (static_cast<ptrdiff_t>(matrix * all.shape[1] + first)) * row;
        return Copy::Stored{kBF16, {rows, all.shape[2]}, {all.bytes.begin() + begin, all.bytes.begin() + begin + static_cast<ptrdiff_t>(rows) * row}};
      };
      for (int64_t e = 0; e < 5; ++e) {
        t[str(experts, e, ".gate_proj.weight")] = take("gate_up_proj", e, 0, 6);
        t[str(experts, e, ".up_proj.weight")] = take("gate_up_proj", e, 6, 6);
        t[str(experts, e, ".down_proj.weight")] = take("down_proj", e, 0, 14);
      }
      t.erase(experts + "gate_up_proj"), t.erase(experts + "down_proj");
    }
  });
  const auto parameters = [](const std::string& folder) {
    const auto model = models::make_language_model(config_of(kMoe), 0);
    materialize(*model);
    models::load_weights(*model, folder);
    std::vector<std::vector<float>> out;
    for (const nn::Parameter& p : model->parameters()) out.push_back(p.value().to_vector<float>());
    return out;
  };
  EXPECT_EQ(parameters(apart.path()), parameters(kMoe));
}

}  // namespace
}  // namespace sheaf
