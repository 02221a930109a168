// Published files with errors, and models that Sheaf does not support: refused, and the message says which file, which tensor or key, what
// it is and what was expected.
#include <filesystem>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kGpt2 = "tests/models/published/gpt2_f32_shards", kLlama = "tests/models/published/llama_bf16_shards",
                  kBase = "tests/models/published/gpt2_f16_base", kScaled = "tests/models/published/llama_f32_scaled",
                  kMistral = "tests/models/published/mistral_f32", kQwen2 = "tests/models/published/qwen2_bf16_tied",
                  kHeads = "tests/models/published/mistral_f32_heads", kQwen3 = "tests/models/published/qwen3_bf16_tied",
                  kYarn = "tests/models/published/qwen3_f32_yarn", kMixtral = "tests/models/published/mixtral_bf16_shards",
                  kQwen3Moe = "tests/models/published/qwen3_moe_bf16", kWindow = "tests/models/published/mistral_f32_window",
                  kWindows = "tests/models/published/qwen3_bf16_windows", kDots1 = "tests/models/published/dots1_bf16",
                  kDots1Window = "tests/models/published/dots1_f32_window",
                  kDeepseek2 = "tests/models/published/deepseek_v2_f32", kDeepseek3 = "tests/models/published/deepseek_v3_bf16",
                  kGemma = "tests/models/published/gemma_bf16", kGemma3 = "tests/models/published/gemma3_bf16",
                  kGemma3Before = "tests/models/published/gemma3_f32_version_4";

using testing::Copy;
using testing::text_of;
using testing::write_text;
using Tensors = std::map<std::string, Copy::Stored>;

TEST(PublishedFiles, TakeOneFileTooAndAnyPathToIt) {
  const Copy copy(kGpt2);
  const int64_t bytes = copy.load();
  const std::string digest = models::PublishedFiles::open(copy / "model.safetensors.index.json").digest();
  EXPECT_EQ(models::PublishedFiles::open(copy.path()).digest(), digest);
  copy.rewrite([](Tensors&) {});
  EXPECT_EQ(copy.load(), bytes);
  // How the tensors are split into files does not matter; their contents do.
  EXPECT_EQ(models::PublishedFiles::open(copy.path()).digest(), digest);
  EXPECT_EQ(models::PublishedFiles::open(copy / "model.safetensors").digest(), digest);
  copy.rewrite([](Tensors& t) { t.at("transformer.ln_f.bias").bytes[5] ^= std::byte{1}; });
  EXPECT_NE(models::PublishedFiles::open(copy.path()).digest(), digest);
}

TEST(PublishedFiles, NothingThere) {
  const auto message = [](const std::string& path) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::PublishedFiles::open(path); });
  };
  const ScratchFolder folder;
  EXPECT_THAT(message(folder / "none"), HasSubstr("there is no '" + (folder / "none") + "'"));
  EXPECT_THAT(message(folder.path()), HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
  write_text(folder / "pytorch_model.bin", "");
  EXPECT_THAT(message(folder.path()), HasSubstr("save it as safetensors"));
}

TEST(PublishedFiles, TensorsThatDoNotFit) {
  const Copy copy(kGpt2);
  const auto refused = [&](const std::function<void(Tensors&)>& edit) {
    const Copy broken(kGpt2);
    broken.rewrite(edit);
    return broken.refused();
  };
  EXPECT_THAT(refused([](Tensors& t) { t.erase("transformer.h.1.ln_2.bias"); }),
              HasSubstr("has no \"transformer.h.1.ln_2.bias\" [12], of which the model's blocks.1.ln2.bias is made"));
  EXPECT_THAT(refused([](Tensors& t) { t["transformer.h.2.ln_2.bias"] = t.at("transformer.h.1.ln_2.bias"); }),
              AllOf(HasSubstr("model.safetensors': \"transformer.h.2.ln_2.bias\" f32[12] is nothing that this gpt2 of 2 layers has")));
  EXPECT_THAT(refused([](Tensors& t) { t.at("transformer.h.0.attn.c_attn.weight").shape = {36, 12}; }),
              AllOf(HasSubstr("model.safetensors': \"transformer.h.0.attn.c_attn.weight\" is f32[36,12]"),
                    HasSubstr("the model's blocks.0.attention.qkv.weight asks for [12,36]")));
  EXPECT_THAT(refused([](Tensors& t) { t.at("transformer.wte.weight").shape = {12, 29}; }), HasSubstr("asks for [29,12]"));
  EXPECT_THAT(refused([](Tensors& t) { t.at("transformer.ln_f.bias").dtype = kI32; }),
              HasSubstr("\"transformer.ln_f.bias\" is i32[12]; weights are f32, f16, bf16 or F8_E4M3"));
  EXPECT_THAT(refused([](Tensors& t) {
                t.at("transformer.ln_f.bias").dtype = kF64;
                t.at("transformer.ln_f.bias").bytes.resize(96);
              }), HasSubstr("\"transformer.ln_f.bias\" is f64, which ln_f.bias, f32, does not hold"));
  // A head in addition to a tied embedding is redundant; without the tie it is a weight like others.
  const Copy tied(kGpt2);
  tied.rewrite([](Tensors& t) { t["lm_head.weight"] = t.at("transformer.wte.weight"); });
  EXPECT_GT(tied.load(), 0);
  for (const bool at_end : {false, true}) {  // and a different one contradicts it
    tied.rewrite([&](Tensors& t) {
      auto& bytes = (t["lm_head.weight"] = t.at("transformer.wte.weight")).bytes;
      bytes[at_end ? bytes.size() - 1 : 0] ^= std::byte{1};
    });
    EXPECT_THAT(tied.refused(), HasSubstr("\"lm_head.weight\" is not \"transformer.wte.weight\", though config.json has them tied"));
  }
  tied.rewrite([](Tensors& t) { t.erase("lm_head.weight"); });
  tied.replace("config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
  EXPECT_THAT(tied.refused(), HasSubstr("has no \"lm_head.weight\" [29,12], of which the model's head.weight is made"));
}

TEST(PublishedFiles, HeadersThatLie) {
  const Copy f8(kBase);
  f8.replace("model.safetensors", "\"F16\"", "\"F8_E4M3\"");  // one tensor's; the header's length no longer matches
  EXPECT_THAT(f8.refused(), HasSubstr("model.safetensors'"));
  const Copy same_length(kBase);
  same_length.replace("model.safetensors", "\"F16\"", "\"F8X\"");
  EXPECT_THAT(same_length.refused(), HasSubstr("unknown dtype \"F8X\""));
  const Copy offsets(kBase);
  const std::string header = R"({"wte.weight":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},)"
                             R"("wpe.weight":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}})";
  write_text(offsets / "model.safetensors", std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header +
                                                std::string(6, 'x'));
  EXPECT_THAT(offsets.refused(), HasSubstr("tensor \"wpe.weight\": overlaps the tensor before it: starts at byte 2"));
  const Copy cut(kBase);
  const std::string text = text_of(cut / "model.safetensors");
  write_text(cut / "model.safetensors", text.substr(0, text.size() - 1));
  EXPECT_THAT(cut.refused(), HasSubstr("model.safetensors'"));
}

TEST(PublishedFiles, IndicesThatLie) {
  const auto refused = [](const std::string& from, const std::string& to) {
    const Copy broken(kGpt2);
    broken.replace("model.safetensors.index.json", from, to);
    return broken.refused();
  };
  const std::string first = "model-00001-of-00004.safetensors";
  const Copy missing(kGpt2);
  missing.remove("model-00002-of-00004.safetensors");
  EXPECT_THAT(missing.refused(), HasSubstr("index.json': names \"model-00002-of-00004.safetensors\", which is missing"));
  EXPECT_THAT(refused(first, "../" + first), HasSubstr("\"../" + first + "\" is not the name of a safetensors file next to it"));
  EXPECT_THAT(refused(first, "/etc/passwd"), HasSubstr("is not the name of a safetensors file"));
  EXPECT_THAT(refused("\"weight_map\"", "\"weights\""), HasSubstr("lacks the field 'weight_map'"));
  EXPECT_THAT(refused("\"weight_map\": {", "\"weight_map\": {,"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused("\"weight_map\": {", "\"weight_map\": {\"x\": 3,"), HasSubstr("not an index of weights"));
  EXPECT_THAT(refused("\"weight_map\": {", "\"weight_map\": {\"x\": \"" + first + "\","),
              HasSubstr("says that \"x\" is in \"" + first + "\", which has no such tensor"));
  const Copy unnamed(kGpt2);
  const Json index = Json::parse(text_of(unnamed / "model.safetensors.index.json"), "index");
  Json::Object map = index.at("weight_map").as_object();
  const std::string dropped = map.back().first;
  map.pop_back();
  write_text(unnamed / "model.safetensors.index.json", Json(Json::Object{{"weight_map", map}}).dump());
  EXPECT_THAT(unnamed.refused(), HasSubstr("index.json': does not name \"" + dropped + "\""));
}

TEST(PublishedConfig, WhatSheafDoesNotComputeIsRefused) {
  const auto refused = [](const std::string& folder, const std::string& key, const Json& value) {
    const Copy copy(folder);
    Json json = Json::parse(text_of(copy / "config.json"), "config.json");
    json.set(key, value);
    write_text(copy / "config.json", json.dump());
    return message_of<CheckpointError>(ExitCode::kData, [&] { models::read_published_config(copy / "config.json"); });
  };
  for (const char* key : {"rope_scaling", "rope_parameters"})
    EXPECT_THAT(refused(kLlama, key, Json::Object{{"factor", 8.0}, {"rope_type", "dynamic"}}),
                AllOf(HasSubstr(str("config.json: ", key, " is {\"factor\":8.0,")),
                      HasSubstr("of the rope_type default, linear, llama3, yarn or longrope, not \"dynamic\"")));
  EXPECT_THAT(refused(kLlama, "rope_parameters", Json::Object{{"rope_theta", "1e4"}}), HasSubstr("rope_theta is not a number"));
  EXPECT_THAT(refused(kLlama, "attention_bias", true), HasSubstr("attention_bias is true: Sheaf's llama has no biases in both"));
  EXPECT_THAT(refused(kLlama, "mlp_bias", true), HasSubstr("mlp_bias is true"));
  const std::string smol = "tests/models/published/smollm3_f32_listed";
  EXPECT_EQ(models::published_config(models::read_published_config(smol + "/config.json")).at("pad_token_id"), Json());
  for (const Json::Array& rotated : {Json::Array{0, 1, 1, 1}, {1, 0, 1, 1}, {1, 0, 0, 1}})
    EXPECT_THAT(refused(smol, "no_rope_layers", rotated), HasSubstr("Sheaf's models have no rotary positions in every N-th layer, or in none"));
  for (const Json::Array& none : {Json::Array{1, 1, 0}, {1, 1, 2, 1}, {1, true, 1, 1}})
    EXPECT_THAT(refused(smol, "no_rope_layers", none), HasSubstr("expected an array with 0 or 1 for each layer"));
  EXPECT_THAT(refused(smol, "use_sliding_window", true), HasSubstr("use_sliding_window is true"));
  EXPECT_THAT(refused(smol, "sliding_window", 4), HasSubstr("attention of smollm3 sees all tokens before"));
  EXPECT_THAT(refused(kLlama, "sliding_window", 4096), HasSubstr("sliding_window is 4096: attention of llama sees all"));
  EXPECT_THAT(refused(kLlama, "layer_types", Json::Array{"full_attention", "sliding_attention"}),
              AllOf(HasSubstr("layer_types is"), HasSubstr("no window is said")));
  EXPECT_THAT(refused(kMistral, "use_sliding_window", true), HasSubstr("use_sliding_window is true: that is a key of Qwen's"));
  EXPECT_THAT(refused(kLlama, "hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\": Sheaf's llama has silu"));
  EXPECT_THAT(refused(kLlama, "head_dim", 5), HasSubstr("head_dim is 5: rotary positions turn pairs"));
  EXPECT_THAT(refused(kQwen3, "head_dim", 0), HasSubstr("head_dim is 0: expected a positive integer"));
  EXPECT_THAT(refused(kQwen3, "attention_bias", true), HasSubstr("attention_bias is true: Sheaf's llama has no biases in both"));
  EXPECT_THAT(refused(kQwen3, "num_key_value_heads", Json()), HasSubstr("num_key_value_heads is null"));
  EXPECT_THAT(refused(kLlama, "partial_rotary_factor", 0.5), HasSubstr("Sheaf rotates whole heads"));
  EXPECT_THAT(refused(kLlama, "rope_interleaved", true), HasSubstr("rope_interleaved is true"));
  EXPECT_THAT(refused(kLlama, "quantization_config", Json::Object{{"bits", 4}}), HasSubstr("quantization_config is {\"bits\":4}"));
  const std::string known =
      "Sheaf has gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, dots1, glm4_moe, deepseek_v2, "
      "deepseek_v3, kimi_k2, gemma, gemma2, gemma3_text, gpt_oss, smollm3, olmo2, olmo3, olmoe, phi3, gemma3, mistral3, qwen3_5, qwen3_5_moe";
  EXPECT_THAT(refused(kLlama, "model_type", "gemma4"), HasSubstr("model_type is \"gemma4\": " + known));
  EXPECT_THAT(refused(kLlama, "model_type", Json()), HasSubstr("model_type is null: " + known));
  for (const Json& window : {Json(0), Json(-1), Json(true), Json("4096")})
    EXPECT_THAT(refused(kMistral, "sliding_window", window), HasSubstr("config.json: sliding_window"));
  EXPECT_THAT(refused(kMistral, "num_key_value_heads", Json()), HasSubstr("num_key_value_heads is null"));
  EXPECT_EQ(refused(kQwen2, "sliding_window", 32768), "no exception");
  EXPECT_THAT(refused(kMixtral, "num_local_experts", Json()), HasSubstr("num_local_experts is null"));
  for (const auto& [folder, key] : {std::pair(kMixtral, "num_local_experts"), {kQwen3Moe, "num_experts"}, {kDots1, "n_routed_experts"},
                                    {kDots1, "n_shared_experts"}})
    EXPECT_THAT(refused(folder, key, 100000000), HasSubstr(str(key, " is 100000000: at most 10,000 experts")));
  EXPECT_THAT(refused(kMixtral, "num_experts_per_tok", 0), HasSubstr("num_experts_per_tok is 0: expected a positive integer"));
  EXPECT_THAT(refused(kMixtral, "router_jitter_noise", 0.1), HasSubstr("router_jitter_noise is 0.1: Sheaf's routers have no noise"));
  EXPECT_THAT(refused(kQwen3Moe, "decoder_sparse_step", 2), HasSubstr("decoder_sparse_step is 2: Sheaf's layers all have experts, or none"));
  EXPECT_THAT(refused(kQwen3Moe, "mlp_only_layers", Json::Array{1}), HasSubstr("mlp_only_layers is [1]: Sheaf's layers all have"));
  EXPECT_THAT(refused(kQwen3Moe, "moe_intermediate_size", Json()), HasSubstr("moe_intermediate_size is null"));
  EXPECT_THAT(refused(kDots1, "n_shared_experts", Json()), HasSubstr("n_shared_experts is null"));
  EXPECT_THAT(refused(kDots1, "first_k_dense_replace", 3), HasSubstr("first_k_dense_replace is 3: of 3 layers none has experts"));
  EXPECT_THAT(refused(kDots1, "moe_layer_freq", 2), HasSubstr("moe_layer_freq is 2: after the first ones"));
  EXPECT_THAT(refused(kGemma, "hidden_act", "silu"), HasSubstr("hidden_act is \"silu\": Gemma's is gelu_pytorch_tanh"));
  EXPECT_THAT(refused(kGemma, "sliding_window", 4), HasSubstr("attention of gemma sees all tokens before"));
  EXPECT_THAT(refused(kGemma3, "hidden_activation", "gelu"), HasSubstr("hidden_activation is \"gelu\": Gemma's is gelu_pytorch_tanh"));
  EXPECT_THAT(refused(kGemma3, "query_pre_attn_scalar", 0), HasSubstr("query_pre_attn_scalar is 0: expected a positive integer"));
  EXPECT_THAT(refused(kGemma3, "final_logit_softcapping", 30.0), HasSubstr("of this model_type Sheaf's logits are not capped"));
  EXPECT_THAT(refused(kGemma3, "use_bidirectional_attention", true), HasSubstr("sees the tokens before"));
  EXPECT_THAT(refused(kLlama, "is_causal", false), HasSubstr("is_causal is false: Sheaf's attention sees the tokens before"));
  const Json full = Json::Object{{"rope_type", "default"}, {"rope_theta", 500.0}};
  EXPECT_THAT(refused(kGemma3, "rope_parameters", Json::Object{{"full_attention", full}}),
              HasSubstr("expected full_attention and sliding_attention"));
  EXPECT_THAT(refused(kGemma3, "rope_parameters", full), HasSubstr("expected full_attention and sliding_attention"));
  EXPECT_THAT(refused(kLlama, "rope_parameters", Json::Object{{"full_attention", full}, {"sliding_attention", full}}), HasSubstr("turn alike"));
  const Json scaled = Json::Object{{"rope_type", "linear"}, {"rope_theta", 500.0}, {"factor", 2.0}};
  EXPECT_THAT(refused(kGemma3, "rope_parameters", Json::Object{{"full_attention", full}, {"sliding_attention", scaled}}),
              HasSubstr("Sheaf scales no frequencies in layers with a window"));
  EXPECT_THAT(refused(kDeepseek3, "scoring_func", "softmax"), HasSubstr("scoring_func is \"softmax\": deepseek_v3 has sigmoid"));
  EXPECT_THAT(refused(kDeepseek3, "rope_interleave", false), HasSubstr("rope_interleave is false"));
  EXPECT_THAT(refused(kDeepseek3, "num_key_value_heads", 2), HasSubstr("each of the 4 heads has keys of its own"));
  EXPECT_THAT(refused(kDeepseek3, "qk_rope_head_dim", 3), HasSubstr("qk_rope_head_dim is 3"));
  EXPECT_THAT(refused(kDeepseek3, "sliding_window", 4), HasSubstr("sliding_window is 4"));
  EXPECT_THAT(refused(kDeepseek3, "n_group", Json()), HasSubstr("n_group is null"));
  EXPECT_THAT(refused(kDeepseek3, "kv_lora_rank", Json()), HasSubstr("kv_lora_rank is null"));
  EXPECT_THAT(refused(kDeepseek2, "topk_method", "group_limited_greedy"), HasSubstr("of deepseek_v2 Sheaf has greedy"));
  EXPECT_THAT(refused(kDeepseek2, "norm_topk_prob", true), HasSubstr("norm_topk_prob is true"));
  EXPECT_THAT(refused(kDots1, "scoring_func", "softmax"), HasSubstr("scoring_func is \"softmax\": dots1 has sigmoid"));
  EXPECT_THAT(refused(kLlama, "hidden_size", 0), HasSubstr("hidden_size is 0: expected a positive integer"));
  EXPECT_THAT(refused(kLlama, "hidden_size", Json()), HasSubstr("hidden_size is null: expected a positive integer"));
  EXPECT_THAT(refused(kGpt2, "n_embd", int64_t{1} << 62), HasSubstr("expected a positive integer, at most 10^9"));
  EXPECT_THAT(refused(kGpt2, "layer_norm_epsilon", -1e-5), HasSubstr("layer_norm_epsilon is -1e-05: expected at least 0"));
  EXPECT_THAT(refused(kLlama, "rms_norm_eps", -1), HasSubstr("rms_norm_eps is -1: expected at least 0"));
  EXPECT_THAT(refused(kLlama, "rope_theta", 0), HasSubstr("rope_theta is 0: expected at least 1"));
  EXPECT_THAT(refused(kGemma3, "rope_local_base_freq", 0), HasSubstr("rope_local_base_freq is 0: expected at least 1"));
  EXPECT_THAT(refused(kQwen3, "rope_parameters", Json::Object{{"rope_type", "default"}, {"rope_theta", -5}}),
              HasSubstr("rope_theta is -5: expected at least 1"));
  EXPECT_THAT(refused(kLlama, "num_hidden_layers", "2"), HasSubstr("num_hidden_layers: [json] expected an integer, found \"2\""));
  EXPECT_THAT(refused(kGpt2, "activation_function", "relu"), HasSubstr("activation_function is \"relu\""));
  EXPECT_THAT(refused(kGpt2, "activation_function", "gelu"), HasSubstr("Sheaf's gpt2 has gelu_new"));
  EXPECT_THAT(refused(kGpt2, "scale_attn_weights", false), HasSubstr("scale_attn_weights is false"));
  EXPECT_THAT(refused(kGpt2, "scale_attn_by_inverse_layer_idx", true), HasSubstr("does not depend on the layer"));
  EXPECT_THAT(refused(kGpt2, "add_cross_attention", true), HasSubstr("no cross-attention"));
  EXPECT_EQ(refused(kGpt2, "some_new_key", true), "no exception");
  EXPECT_EQ(refused(kGpt2, "activation_function", "gelu_pytorch_tanh"), "no exception");
  EXPECT_EQ(refused(kLlama, "rope_scaling", Json::Object{{"rope_type", "default"}, {"rope_theta", 500}}), "no exception");
  EXPECT_THAT(refused(kLlama, "rope_scaling", Json::Object{{"rope_type", "default"}}),  // with a base of 10,000
              HasSubstr("rope_parameters is {\"rope_theta\":500.0,\"rope_type\":\"default\"}: rope_scaling says otherwise"));

  const Copy copy(kLlama);
  write_text(copy / "config.json", "[1]");
  EXPECT_THAT(copy.refused(), HasSubstr("config.json is not a JSON object"));
  write_text(copy / "config.json", "{\"model_type\": \"llama\"");
  EXPECT_THAT(copy.refused(), HasSubstr("not valid JSON"));
}

/// The model, for its rotary scaling, of a config.json with this value of `key`, and without the other key.
models::ModelConfig rope_of(const char* key, const Json& value) {
  const Copy copy(kScaled);
  Json json = Json::parse(text_of(copy / "config.json"), "config.json");
  json.set("rope_scaling", Json()).set(key, value);
  write_text(copy / "config.json", json.dump());
  return models::read_published_config(copy / "config.json");
}

TEST(PublishedConfig, ScaledRotaryPositions) {
  const Json::Object llama3 = {{"rope_type", "llama3"}, {"factor", 32}, {"low_freq_factor", 0.5}, {"high_freq_factor", 6.0},
                               {"original_max_position_embeddings", 4096}};
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const models::ModelConfig m = rope_of(key, llama3);
    EXPECT_TRUE(models::rotary_scaling(m.rope_scaling) == RotaryScaling::llama3(32, 0.5, 6, 4096));
    EXPECT_EQ(m.rope_theta, 100.0);
    for (const char* type : {"type", "rope_type"})
      EXPECT_TRUE(models::rotary_scaling(rope_of(key, Json::Object{{type, "linear"}, {"factor", 2.5}}).rope_scaling) ==
                  RotaryScaling::linear(2.5));
    EXPECT_TRUE(models::rotary_scaling(rope_of(key, Json::Object{{"rope_type", "default"}}).rope_scaling) == RotaryScaling());
    const auto refused = [&](const char* name, const Json& value) {
      Json json = llama3;
      json.set(name, value);
      return message_of<CheckpointError>(ExitCode::kData, [&] { rope_of(key, json); });
    };
    EXPECT_THAT(refused("factor", 0.5), HasSubstr("factor is 0.5: expected a number from 1 to"));
    EXPECT_THAT(refused("factor", Json()), HasSubstr("factor is not a number"));
    EXPECT_THAT(refused("low_freq_factor", 0), HasSubstr("low_freq_factor is 0: expected a positive number"));
    EXPECT_THAT(refused("high_freq_factor", 0.5), HasSubstr("high_freq_factor is 0.5: expected a number above low_freq_factor"));
    for (const Json& tokens : {Json(0), Json(-1), Json(1.5), Json(1e300)})
      EXPECT_THAT(refused("original_max_position_embeddings", tokens), HasSubstr("is no number of tokens"));
    for (size_t i = 1; i < llama3.size(); ++i) {
      Json::Object without = llama3;
      without.erase(without.begin() + static_cast<int64_t>(i));
      EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { rope_of(key, without); }),
                  HasSubstr(llama3[i].first + " is missing"));
    }
  }
  EXPECT_EQ(rope_of("rope_parameters", Json::Object{{"rope_theta", 5e5}, {"rope_type", "default"}}).rope_theta, 5e5);
  // If both keys are given, they must agree.
  const auto refused = [](const char* key, const Json& value) {
    const Copy copy(kScaled);
    Json json = Json::parse(text_of(copy / "config.json"), "config.json");
    json.set(key, value);
    write_text(copy / "config.json", json.dump());
    return message_of<CheckpointError>(ExitCode::kData, [&] { models::read_published_config(copy / "config.json"); });
  };
  EXPECT_THAT(refused("rope_parameters", Json::Object{{"rope_theta", 1e4}, {"rope_type", "default"}}),
              HasSubstr("rope_parameters is {\"rope_theta\":10000.0,\"rope_type\":\"default\"}: rope_scaling says otherwise"));
  Json again = Json::parse(text_of(kScaled + "/config.json"), "config.json").at("rope_scaling");
  const double theta = models::read_published_config(kScaled + "/config.json").rope_theta;
  again.set("rope_theta", theta);
  EXPECT_EQ(refused("rope_parameters", again), "no exception");
  again.set("rope_theta", theta + 1);
  EXPECT_THAT(refused("rope_parameters", again), HasSubstr("rope_scaling says otherwise"));
  EXPECT_THAT(refused("original_max_position_embeddings", 64),
              HasSubstr("original_max_position_embeddings is 64: rope_scaling says otherwise"));
  EXPECT_EQ(refused("original_max_position_embeddings", 32), "no exception");
}

TEST(PublishedConfig, YarnIsAsTransformersHasIt) {
  const Json cases = Json::parse(text_of("tests/models/published/yarn.json"), "yarn.json");
  EXPECT_EQ(cases.as_array().size(), 9u);
  for (const Json& c : cases.as_array()) {
    SCOPED_TRACE(c.at("rope_parameters").dump());
    const models::ModelConfig m = rope_of("rope_parameters", c.at("rope_parameters"));
    const RotaryScaling scaling = models::rotary_scaling(m.rope_scaling);
    EXPECT_NEAR(scaling.amplitude, c.at("attention_factor").as_double(), 1e-15);
    const int64_t half = c.at("head_dim").as_int() / 2;
    const RotaryFrequencies frequencies(m.rope_theta, half, scaling);
    for (int64_t i = 0; i < half; ++i)
      EXPECT_NEAR(frequencies(i) / c.at("frequencies").as_array()[static_cast<size_t>(i)].as_double(), 1.0, 1e-6) << i;
    // Written and read again it is the same.
    const Json written = models::published_config(m).at("rope_scaling");
    EXPECT_TRUE(rope_of("rope_scaling", written).rope_scaling == m.rope_scaling) << written.dump();
  }
  const auto refused = [&](const char* name, const Json& value) {
    Json json = cases.as_array()[3].at("rope_parameters");
    json.set(name, value);
    return message_of<CheckpointError>(ExitCode::kData, [&] { rope_of("rope_parameters", json); });
  };
  EXPECT_THAT(refused("factor", 0.5), HasSubstr("factor is 0.5: expected a number from 1 to"));
  EXPECT_THAT(refused("beta_fast", 1.5), HasSubstr("beta_fast is 1.5: expected a number not below beta_slow, 2"));
  EXPECT_THAT(refused("beta_slow", -1), HasSubstr("beta_slow is -1: expected a positive number"));
  EXPECT_THAT(refused("beta_slow", "1"), HasSubstr("beta_slow is not a number"));
  EXPECT_THAT(refused("attention_factor", 0.0), HasSubstr("attention_factor is 0: expected a positive number"));
  EXPECT_THAT(refused("attention_factor", 1e9), HasSubstr("attention_factor is 1e+09: expected a positive number up to"));
  EXPECT_THAT(refused("mscale", -0.5), HasSubstr("mscale is -0.5: expected a positive number"));
  EXPECT_THAT(refused("truncate", 1), HasSubstr("truncate is neither true nor false"));
  EXPECT_THAT(refused("original_max_position_embeddings", Json()), HasSubstr("original_max_position_embeddings is not a number"));
  EXPECT_EQ(refused("mscale", Json()), "no exception");
  EXPECT_EQ(refused("beta_fast", 0), "no exception");
}

struct Windows {
  int64_t window, full_attention_every;
  std::string refusal;
  bool operator==(const Windows&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Windows& w) { return out << w.window << ' ' << w.full_attention_every << ' ' << w.refusal; }

/// The windows by config.json with these keys changed; Json() sets a key to null rather than removing it. Or the refused key, if any.
Windows windows_with(const std::string& folder, const std::vector<std::pair<const char*, Json>>& changes, const char* without = nullptr) {
  const Copy copy(folder);
  Json::Object members = Json::parse(text_of(copy / "config.json"), "config.json").as_object();
  if (without) std::erase_if(members, [&](const auto& m) { return m.first == without; });
  Json json(members);
  for (const auto& [key, value] : changes) json.set(key, value);
  write_text(copy / "config.json", json.dump());
  try {
    const models::ModelConfig m = models::read_published_config(copy / "config.json");
    return {m.window, m.full_attention_every, ""};
  } catch (const CheckpointError& e) {
    const std::string message = e.what();
    const size_t begin = message.find("config.json: ") + 13;
    return {0, 0, message.substr(begin, message.find(' ', begin) - begin)};
  }
}

TEST(PublishedConfig, WindowsAreThoseThatTransformersMakesOfIt) {
  const Json s = "sliding_attention", f = "full_attention";
  const auto layers = [](const Json::Array& types) {
    return std::vector<std::pair<const char*, Json>>{{"layer_types", types}, {"num_hidden_layers", std::ssize(types)}};
  };
  EXPECT_EQ(windows_with(kWindow, {}), (Windows{4, 0, ""}));
  EXPECT_EQ(windows_with(kMistral, {}), (Windows{0, 0, ""}));
  EXPECT_EQ(windows_with(kMistral, {}, "sliding_window"), (Windows{4096, 0, ""}));
  EXPECT_EQ(windows_with(kMixtral, {{"sliding_window", 7}}), (Windows{7, 0, ""}));
  EXPECT_EQ(windows_with(kMixtral, {}, "sliding_window"), (Windows{0, 0, ""}));
  EXPECT_EQ(windows_with(kWindow, layers({s, f})), (Windows{0, 0, "layer_types"}));  // Sheaf's Mistral has no such layers
  EXPECT_EQ(windows_with(kWindow, layers({f, f})), (Windows{0, 0, "layer_types"}));
  EXPECT_EQ(windows_with(kWindow, layers({s, s})), (Windows{4, 0, ""}));

  EXPECT_EQ(windows_with(kWindows, {}), (Windows{3, 2, ""}));
  EXPECT_EQ(windows_with(kWindows, layers({s, s, f, s, s, f, s})), (Windows{3, 3, ""}));
  EXPECT_EQ(windows_with(kWindows, layers({s, s, s, f})), (Windows{3, 4, ""}));
  EXPECT_EQ(windows_with(kWindows, layers({s, s, s})), (Windows{3, 0, ""}));
  EXPECT_EQ(windows_with(kWindows, layers({f, f, f})), (Windows{0, 0, ""}));
  for (const Json::Array& types : {Json::Array{f, s, f}, {s, f, f}, {s, f, s, s}, {s, s, "chunked_attention"}})
    EXPECT_EQ(windows_with(kWindows, layers(types)), (Windows{0, 0, "layer_types"}));
  EXPECT_EQ(windows_with(kWindows, {{"num_hidden_layers", 4}}), (Windows{0, 0, "layer_types"}));
  EXPECT_EQ(windows_with(kWindows, {{"use_sliding_window", false}}), (Windows{0, 0, "layer_types"}));

  // Qwen2 with version 4 of transformers, which lists no layer types: the first max_window_layers of its 2 layers have full attention.
  EXPECT_EQ(windows_with(kQwen2, {}, "layer_types"), (Windows{0, 0, ""}));
  const auto from = [&](int64_t layer) {
    return windows_with(kQwen2, {{"use_sliding_window", true}, {"max_window_layers", layer}}, "layer_types");
  };
  EXPECT_EQ(from(28), (Windows{0, 0, ""}));
  EXPECT_EQ(from(2), (Windows{0, 0, ""}));
  EXPECT_EQ(from(1), (Windows{0, 0, "max_window_layers"}));
  EXPECT_EQ(from(0), (Windows{8, 0, ""}));
  EXPECT_EQ(from(-1), (Windows{0, 0, "max_window_layers"}));
  EXPECT_EQ(windows_with(kQwen3Moe, {{"use_sliding_window", true}, {"sliding_window", 5}}, "layer_types"), (Windows{5, 0, ""}));
  EXPECT_EQ(windows_with(kQwen3Moe, {{"use_sliding_window", true}, {"sliding_window", Json()}}, "layer_types"), (Windows{0, 0, ""}));
  EXPECT_EQ(windows_with(kQwen3Moe, {{"use_sliding_window", true}}, "sliding_window"), (Windows{4096, 0, ""}));
}

TEST(PublishedConfig, WindowsThatNoArchitectureHasAreNotWritten) {
  const auto refusal = [](const std::string& folder, int64_t window, int64_t full_attention_every) {
    models::ModelConfig m = models::read_published_config(folder + "/config.json");
    m.window = window, m.full_attention_every = full_attention_every;
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(m); });
  };
  EXPECT_THAT(refusal(kGpt2, 5, 0), HasSubstr("model.window 5: no published architecture has that"));
  for (const std::string& folder : {kLlama, kMixtral, kQwen3Moe}) {
    EXPECT_THAT(refusal(folder, 5, 2), HasSubstr("model.window 5 with model.full_attention_every 2: no published"));
    EXPECT_EQ(refusal(folder, 5, 0), "no exception");
    EXPECT_EQ(refusal(folder, 0, 2), "no exception");
  }
  models::ModelConfig llama = models::read_published_config(kLlama + "/config.json");
  llama.window = 5;
  const Json written = models::published_config(llama);
  EXPECT_EQ(written.at("model_type").as_string(), "mistral");
  EXPECT_EQ(written.at("sliding_window").as_int(), 5);
}

// If config.json does not say, transformers' heads are width / heads wide, and Qwen3's 128.
TEST(PublishedConfig, HeadsOfNoGivenWidth) {
  for (const auto& [folder, width] : {std::pair{kHeads, 4}, {kQwen2, 4}, {kQwen3, 128}}) {
    const Copy copy(folder);
    Json json = Json::parse(text_of(copy / "config.json"), "config.json");
    json.set("head_dim", Json());
    write_text(copy / "config.json", json.dump());
    EXPECT_EQ(models::read_published_config(copy / "config.json").head_dim, width) << folder;
  }
}

TEST(PublishedConfig, WhatIsWrittenIsReadAgain) {
  for (const std::string& folder : {kGpt2, kLlama, kScaled, kMistral, kQwen2, kHeads, kQwen3, kYarn, kMixtral, kQwen3Moe, kWindow,
                                    kWindows, kDots1, kDots1Window, kGemma, kGemma3, kGemma3Before}) {
    const models::ModelConfig before = models::read_published_config(folder + "/config.json");
    const ScratchFolder scratch;
    write_text(scratch / "config.json", models::published_config(before).dump());
    const models::ModelConfig after = models::read_published_config(scratch / "config.json");
    models::check_published_shape(after, before, folder);
    EXPECT_EQ(after.context, before.context);
  }
  models::ModelConfig gemma = models::read_published_config(kGemma3 + "/config.json");
  gemma.post_norms = false;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(gemma); }), HasSubstr("cannot be written as one"));
  models::ModelConfig both = models::read_published_config(kQwen3 + "/config.json");
  both.qkv_bias = true;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::published_config(both); }),
              HasSubstr("model.qk_norm with model.qkv_bias: no published architecture has both"));
  models::ModelConfig linear = models::read_published_config(kScaled + "/config.json");
  linear.rope_scaling = {.rope_type = "linear", .factor = 3.0};
  EXPECT_EQ(models::published_config(linear).at("rope_scaling").dump(), R"({"rope_type":"linear","factor":3.0})");
}

}  // namespace
}  // namespace sheaf
