// Weights in FP8 by blocks, as DeepSeek-V3 and Kimi K2 are published; and GLM-4.5, whose mixtures are of the same kind.
#include <cmath>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using models::ModelConfig;
using testing::Changes;
using testing::Copy;
using testing::config_of;
using testing::config_with;
using testing::write_text;
using Tensors = std::map<std::string, Copy::Stored>;

const std::string kKimi = "tests/models/published/kimi_k2_fp8", kGlm = "tests/models/published/glm4_moe_bf16",
                  kLlama = "tests/models/published/llama_f32_tied", kDots1 = "tests/models/published/dots1_bf16";

/// E4M3 by its definition: a sign, four bits of exponent, three of mantissa, no infinity.
double e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size = exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return code & 0x80 ? -size : size;
}

template <class T>
std::vector<T> raw(const SafetensorsFile& file, const std::string& name) {
  std::vector<T> out(static_cast<size_t>(file.at(name).shape.numel()));
  file.read(name, 0, std::ssize(out), out.data());
  return out;
}

// Each value is its code's value times the scale of its block of 5 x 7, which divide none of the matrices' sizes.
TEST(PublishedFp8, EachElementIsWhatTheFormulaSays) {
  const auto file = SafetensorsFile::open(kKimi + "/model.safetensors");
  const ModelConfig config = config_of(kKimi);
  const auto model = models::make_language_model(config, 0);
  materialize(*model);
  models::load_weights(*model, kKimi);
  std::map<std::string, std::vector<float>> ours;
  for (const nn::Parameter& p : model->parameters()) ours[p.name()] = p.value().to_vector<float>();
  int64_t matrices = 0;
  for (const models::PublishedTensor& t : models::published_tensors(config)) {
    if (!file.at(t.name).e4m3) continue;
    const auto codes = raw<uint8_t>(file, t.name);
    const auto scales = raw<float>(file, t.name + "_scale_inv");
    const int64_t columns = t.shape[1], of_a_row = (columns + 6) / 7;
    for (int64_t i = 0; i < t.shape.numel(); ++i) {
      const int64_t r = i / columns, c = i % columns;
      const double value = e4m3(codes[static_cast<size_t>(i)]) * scales[static_cast<size_t>(r / 5 * of_a_row + c / 7)];
      ASSERT_EQ(ours.at(t.own)[static_cast<size_t>(t.first_row * columns + i)], static_cast<float>(value)) << t.name << ' ' << i;
    }
    ++matrices;
  }
  EXPECT_EQ(matrices, 2 * 5 + 3 + 3 * 5);  // of both layers' attention, the first one's MLP, four experts and a shared one
}

/// A file in which this tensor, of bytes, is in FP8.
void mark_as_fp8(const std::string& path, const std::string& name) {
  const std::string file = testing::text_of(path);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  std::string header = file.substr(8, length);
  const size_t dtype = header.find("\"U8\"", header.find("\"" + name + "\""));
  ASSERT_NE(dtype, std::string::npos);
  header.replace(dtype, 4, "\"F8_E4M3\"");
  const uint64_t longer = header.size();
  write_text(path, std::string(reinterpret_cast<const char*>(&longer), 8) + header + file.substr(8 + length));
}

/// A copy of a Llama with one matrix, [24, 16], in FP8: code i is i, and scales of this shape are 1/2, in bf16.
const std::string kMatrix = "model.layers.0.mlp.gate_proj.weight";
struct WithFp8 : Copy {
  explicit WithFp8(const Shape& scales) : Copy(kLlama) {
    rewrite([&](Tensors& t) {
      Copy::Stored& codes = t.at(kMatrix);
      codes.dtype = kU8, codes.bytes.resize(24 * 16);
      for (size_t i = 0; i < codes.bytes.size(); ++i) codes.bytes[i] = static_cast<std::byte>(i % 256);
      const std::vector<bf16> halves(static_cast<size_t>(scales.numel()), bf16(0.5f));
      const auto* bytes = reinterpret_cast<const std::byte*>(halves.data());
      t[kMatrix + "_scale_inv"] = {kBF16, scales, {bytes, bytes + halves.size() * 2}};
    });
    mark_as_fp8(*this / "model.safetensors", kMatrix);
  }
  void set_blocks(const Json& sizes) const {
    Json json = Json::parse(testing::text_of(*this / "config.json"), "config.json");
    json.set("quantization_config", Json::Object{{"quant_method", "fp8"}, {"weight_block_size", sizes}});
    write_text(*this / "config.json", json.dump());
  }
};

// All codes, including NaN; one block of 128 x 128 if no config.json says otherwise.
TEST(PublishedFp8, AllCodes) {
  const WithFp8 folder({1, 1});
  const ModelConfig config = config_of(folder.path());
  const auto model = models::make_language_model(config, 0);
  materialize(*model);
  const int64_t bytes = models::load_weights(*model, folder.path());
  folder.remove("config.json");
  EXPECT_EQ(models::load_weights(*model, folder.path()), bytes);
  for (const nn::Parameter& p : model->parameters()) {
    if (p.name() != "blocks.0.mlp.gate.weight") continue;
    const auto values = p.value().to_vector<float>();
    for (size_t i = 0; i < values.size(); ++i) {
      const double expected = e4m3(static_cast<uint8_t>(i % 256)) / 2;
      if (std::isnan(expected)) EXPECT_TRUE(std::isnan(values[i])) << i;
      else EXPECT_EQ(values[i], expected) << i;
    }
  }
  const Copy plain(kLlama);
  EXPECT_EQ(bytes, plain.load() - 24 * 16 * 3);  // a byte a value, not four
}

TEST(PublishedFp8, FilesThatDoNotFit) {
  const auto blocks = [](const Json& sizes, const Shape& scales) {
    const WithFp8 folder(scales);
    folder.set_blocks(sizes);
    return folder.refused();
  };
  EXPECT_EQ(blocks(Json::Array{24, 16}, {1, 1}), "no exception");
  EXPECT_EQ(blocks(Json::Array{23, 15}, {2, 2}), "no exception");
  EXPECT_THAT(blocks(Json::Array{23, 15}, {1, 1}), AllOf(HasSubstr("_scale_inv\" is bf16[1,1]"), HasSubstr("asks for [2,2]")));
  for (const Json& sizes :
       {Json(), Json(128), Json(Json::Array{128}), Json(Json::Array{0, 128}), Json(Json::Array{128, 128, 1}), Json(Json::Array{128, "x"})})
    EXPECT_THAT(blocks(sizes, {1, 1}), HasSubstr("Sheaf reads FP8 in blocks with a scale each: expected two sizes as weight_block_size"))
        << sizes.dump();
  const auto refused = [](const std::function<void(Tensors&)>& edit, const std::string& fp8 = "") {
    const Copy broken(kLlama);
    broken.rewrite(edit);
    if (!fp8.empty()) mark_as_fp8(broken / "model.safetensors", fp8);
    return broken.refused();
  };
  const auto to_bytes = [](Copy::Stored& s) { s.dtype = kU8, s.bytes.resize(static_cast<size_t>(s.shape.numel())); };
  EXPECT_THAT(refused([&](Tensors& t) { to_bytes(t.at(kMatrix)); }), HasSubstr("is u8[24,16]; weights are f32, f16, bf16 or F8_E4M3"));
  EXPECT_THAT(refused([&](Tensors& t) { to_bytes(t.at(kMatrix)); }, kMatrix), HasSubstr("has no \"" + kMatrix + "_scale_inv\" [1,1]"));
  EXPECT_THAT(refused([&](Tensors& t) { to_bytes(t.at("model.norm.weight")); }, "model.norm.weight"),
              HasSubstr("model.norm.weight\" is F8_E4M3[16]; of matrices alone blocks have scales"));
  EXPECT_THAT(refused([&](Tensors& t) { t[kMatrix + "_scale_inv"] = t.at("model.norm.weight"); }), HasSubstr("_scale_inv\" f32[16] is nothing that"));
}

TEST(PublishedFp8, KimiK2IsReadAndWrittenAsDeepseekV3) {
  const ModelConfig m = config_of(kKimi);
  EXPECT_EQ(m.expert_affinity, "sigmoid");
  EXPECT_EQ(m.expert_scale, 2.827);
  EXPECT_EQ(m.rope_scaling.beta_fast, 1.0);
  EXPECT_TRUE(m.expert_bias && m.normalize_experts && m.kv_lora_rank == 7);
  const Json json = models::published_config(m, kBF16);
  EXPECT_EQ(json.at("model_type").as_string(), "deepseek_v3");
  EXPECT_FALSE(json.find("quantization_config"));
  testing::expect_read_again(m, json);
}

TEST(PublishedGlm, IsReadAndWritten) {
  const ModelConfig m = config_of(kGlm);
  EXPECT_TRUE(m.qkv_bias && m.qk_norm && m.expert_bias && m.normalize_experts && !m.out_bias && !m.tie_embeddings);
  EXPECT_EQ(m.rotary_dim, 4);
  EXPECT_EQ(m.head_dim, 8);
  EXPECT_EQ(m.dense_layers, 1);
  EXPECT_EQ(m.expert_scale, 2.5);
  EXPECT_EQ(m.norm_eps, 1e-5);
  EXPECT_EQ(models::open_saved_model("generate", kGlm).model.mtp_layers, 1);
  const auto written = [](const ModelConfig& model) {
    const Json json = models::published_config(model);
    testing::expect_read_again(model, json);
    return json.at("model_type").as_string();
  };
  EXPECT_EQ(written(m), "glm4_moe");
  // GLM-4.5-Air has no norms. With norms, without biases, and with heads rotated entirely, it is dots.llm1.
  ModelConfig air = m;
  air.qk_norm = false;
  EXPECT_EQ(written(air), "glm4_moe");
  ModelConfig dots1 = m;
  dots1.qkv_bias = false, dots1.rotary_dim = 0;
  EXPECT_EQ(models::published_architecture(dots1), "dots1");
  EXPECT_TRUE(models::publishes_mtp(air));
  EXPECT_FALSE(models::publishes_mtp(dots1));
  // transformers' defaults where a file says nothing.
  const ModelConfig least = config_with(kGlm, {}, {"rope_parameters", "attention_bias", "use_qk_norm", "norm_topk_prob", "rms_norm_eps", "n_group",
                                                   "topk_group", "routed_scaling_factor", "head_dim"});
  EXPECT_TRUE(!least.qkv_bias && !least.qk_norm && least.normalize_experts);
  EXPECT_EQ(least.head_dim, 4);
  EXPECT_EQ(least.rotary_dim, 2);
  EXPECT_EQ(least.norm_eps, 1e-5);
  EXPECT_EQ(least.expert_scale, 1.0);
}

TEST(PublishedGlm, WhatSheafDoesNotComputeIsRefused) {
  const auto refused = [](const char* key, const Json& value) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { config_with(kGlm, {{key, value}}); });
  };
  EXPECT_THAT(refused("sliding_window", 4), HasSubstr("attention of glm4_moe sees all tokens before"));
  EXPECT_THAT(refused("first_k_dense_replace", 3), HasSubstr("first_k_dense_replace is 3: of 3 layers none has experts"));
  EXPECT_THAT(refused("scoring_func", "softmax"), HasSubstr("glm4_moe has sigmoid"));
  EXPECT_THAT(refused("rope_parameters", Json::Object{{"partial_rotary_factor", 0.1}}), HasSubstr("rotary positions turn pairs, of all 8"));
  ModelConfig m = config_of(kGlm);
  m.window = 4;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m); }), HasSubstr("this model cannot be written as one"));
}

}  // namespace
}  // namespace sheaf
