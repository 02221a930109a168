// A run that starts from published weights, as a user runs it: what it takes from config.json, what it refuses, how it is resumed, and what
// it exports.
#include <cstdint>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::run_sheaf;
using testing::operator+;
using testing::Words;

const std::string kGpt2 = "tests/models/published/gpt2_f32_shards", kBase = "tests/models/published/gpt2_f16_base",
                  kLlama = "tests/models/published/llama_bf16_shards", kScaled = "tests/models/published/llama_f32_scaled",
                  kQwen2 = "tests/models/published/qwen2_bf16_tied", kQwen3 = "tests/models/published/qwen3_bf16_tied",
                  kYarn = "tests/models/published/qwen3_f32_yarn", kMixtral = "tests/models/published/mixtral_bf16_shards",
                  kQwen3Moe = "tests/models/published/qwen3_moe_bf16", kDots1 = "tests/models/published/dots1_bf16",
                  kDeepseek2 = "tests/models/published/deepseek_v2_f32", kDeepseek3 = "tests/models/published/deepseek_v3_bf16",
                  kGemma = "tests/models/published/gemma_bf16", kGemma3 = "tests/models/published/gemma3_bf16",
                  kGptOss = "tests/models/published/gpt_oss_bf16", kMxfp4 = "tests/models/published/gpt_oss_mxfp4",
                  kQwen3Next = "tests/models/published/qwen3_next_bf16", kQwen35 = "tests/models/published/qwen3_5_bf16_images",
                  kQwen35Moe = "tests/models/published/qwen3_5_moe_bf16", kGemma3Images = "tests/models/published/gemma3_bf16_images",
                  kGlm = "tests/models/published/glm4_moe_bf16", kKimi = "tests/models/published/kimi_k2_fp8",
                  kSmol = "tests/models/published/smollm3_bf16", kPhi3 = "tests/models/published/phi3_bf16_longrope";

struct Folder : ScratchFolder {
  Folder() { testing::write_sample_tokens(*this / "tokens.bin"); }
  Words train(const std::string& weights, const std::string& run) const {
    return {"train", "--model.weights", weights, "--data.train_file", *this / "tokens.bin", "--data.val_file",
            *this / "tokens.bin", "--output.folder", *this / run, "--train.batch", "4", "--train.warmup", "0",
            "--train.schedule", "constant", "--train.eval_every", "3"};
  }
  std::string copy(const std::string& weights, const std::string& name) const {
    std::filesystem::create_directory(*this / name);
    for (const auto& entry : std::filesystem::directory_iterator(weights)) {
      const std::string to = *this / name + "/" + entry.path().filename().string();
      std::ofstream(to, std::ios::binary) << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    }
    return *this / name;
  }
};

/// Names and bytes of all tensors of a file.
std::map<std::string, std::vector<std::byte>> tensors(const std::string& path) {
  std::map<std::string, std::vector<std::byte>> out;
  const auto file = SafetensorsFile::open(path);
  for (const auto& [name, entry] : file.tensors()) {
    out[name].resize(static_cast<size_t>(entry.bytes()));
    file.read(name, 0, entry.shape.numel(), out[name].data());
  }
  return out;
}

double last_loss(const std::string& out) { return testing::last_number(out, "validation loss"); }

/// Changes a byte of the values in a file.
void damage(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-7, std::ios::end);
  file.put('\x3c');
}

TEST(Weights, TheModelsShapeIsTheirs) {
  const Folder folder;
  const Outcome r = run_sheaf(folder.train(kLlama, "run") + Words{"--print-config"});
  ASSERT_EQ(r.code, 0) << r.err;
  for (const char* line : {"type = \"llama\"", "layers = 2", "heads = 4", "kv_heads = 2", "width = 16", "mlp_width = 24",
                           "context = 13", "vocab = 31", "rope_theta = 500.0", "norm_eps = 0.001", "tie_embeddings = false"})
    EXPECT_THAT(r.out, HasSubstr(std::string(line) + "\n"));
  const Outcome scaled = run_sheaf(folder.train(kScaled, "run") + Words{"--print-config"});
  ASSERT_EQ(scaled.code, 0) << scaled.err;
  for (const char* line : {"rope_theta = 100.0", "rope_scaling.rope_type = \"llama3\"", "rope_scaling.factor = 8.0",
                           "rope_scaling.low_freq_factor = 1.0", "rope_scaling.high_freq_factor = 4.0",
                           "rope_scaling.original_max_position_embeddings = 32"})
    EXPECT_THAT(scaled.out, HasSubstr(std::string(line) + "\n"));
  // The plan of a step is that of such a model.
  const Outcome tape = run_sheaf({"tape", "--model.weights", kLlama, "--world", "4"});
  ASSERT_EQ(tape.code, 0) << tape.err;
  EXPECT_THAT(tape.out, HasSubstr("parameters "));
}

TEST(Weights, ContradictionsAreRefused) {
  const Folder folder;
  const auto refused = [&](const Words& more, int code, const std::string& part) {
    const Outcome r = run_sheaf(folder.train(kGpt2, "run") + more);
    EXPECT_EQ(r.code, code) << r.err;
    EXPECT_THAT(r.err, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  };
  const std::string from = " in " + kGpt2 + "/config.json";
  refused({"--model.layers", "4"}, 64, "model.layers is 4, but 2" + from);
  refused({"--model.heads", "4"}, 64, "model.heads is 4, but 3" + from);
  refused({"--model.vocab", "64"}, 64, "model.vocab is 64, but 29" + from);
  refused({"--model.type", "llama"}, 64, "model.type is llama, but gpt2" + from);
  refused({"--model.bias", "false"}, 64, "model.bias is false, but true" + from);
  refused({"--model.tie_embeddings", "false"}, 64, "model.tie_embeddings is false, but true" + from);
  refused({"--model.context", "12"}, 64, "model.context is 12, more than the 11 of " + kGpt2);
  refused({"--model.preset", "gpt2-124m"}, 64, "model.layers is 12, but 2" + from);
  refused({"--model.weights", kScaled, "--model.rope_scaling.factor", "32"}, 64,
          "model.rope_scaling.factor is 32, but 8 in " + kScaled + "/config.json");
  refused({"--model.weights", kScaled, "--model.rope_scaling.rope_type", "default"}, 64,
          "model.rope_scaling.rope_type is default, but llama3 in " + kScaled);
  refused({"--model.weights", folder / "none"}, 64, "there is no '" + (folder / "none") + "'");
  refused({"--model.weights", folder.path(), "--model.vocab", "29"}, 64, "has neither model.safetensors");
  // Without a config.json, shapes are checked by the tensors themselves.
  const std::string copy = folder.copy(kGpt2, "copy");
  std::filesystem::remove(copy + "/config.json");
  const Words shape = {"--model.weights", copy, "--model.layers", "2", "--model.heads", "3", "--model.width", "12",
                       "--model.mlp_width", "20", "--model.bias", "true", "--model.context", "11"};
  refused(shape + Words{"--model.vocab", "30"}, 65, "\"transformer.wte.weight\" is f32[29,12]; the model's wte.weight asks for [30,12]");
  expect_ok(run_sheaf(folder.train(kGpt2, "works") + shape + Words{"--model.vocab", "29", "--train.steps", "0"}));
}

TEST(Weights, GiveTheSameLossOnAnyNumberOfRanks) {
  const Folder folder;
  double expected = 0;
  for (const std::string& weights : {kGpt2, kBase, kLlama})
    for (const auto& [world, tensor] : {std::pair{1, 1}, {2, 1}, {3, 1}, {2, 2}, {4, 2}}) {
      SCOPED_TRACE(str(weights, " on ", world, " in groups of ", tensor));
      const std::string run = str("run", world, "-", tensor, weights.substr(weights.rfind('/') + 1));
      const Outcome r = run_sheaf(testing::on_ranks(world, folder.train(weights, run) + Words{"--train.steps", "0"} +
                                                               Words{"--sharding.tensor", std::to_string(tensor)}));
      ASSERT_EQ(r.code, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr("starts from the weights in " + weights));
      const double loss = last_loss(r.out);
      if (world == 1) expected = loss;
      EXPECT_NEAR(loss, expected, 1e-6);
    }
}

TEST(Weights, AResumedRunNeedsThemNoMore) {
  const Folder folder;
  const std::string copy = folder.copy(kGpt2, "copy");
  expect_ok(run_sheaf(folder.train(kGpt2, "whole") + Words{"--train.steps", "6"}));
  expect_ok(run_sheaf(folder.train(copy, "parts") + Words{"--train.steps", "3"}));
  // Other weights would not have led to this checkpoint; missing ones do not matter.
  damage(copy + "/model-00001-of-00004.safetensors");
  const Outcome other = run_sheaf(folder.train(copy, "parts") + Words{"--train.steps", "6", "--resume"});
  EXPECT_EQ(other.code, 76) << other.err;
  EXPECT_THAT(other.err, HasSubstr("model.weights was '" + copy + "' with XXH3 "));
  std::filesystem::remove_all(copy);
  expect_ok(run_sheaf(testing::on_ranks(1, {"train", "--resume", "--output.folder", folder / "parts", "--train.steps", "6"})));
  testing::expect_same_curve(testing::read_metrics(folder / "parts/metrics.jsonl"),
                             testing::read_metrics(folder / "whole/metrics.jsonl"), "resumed");
  // A run that began from random weights did not begin from these.
  const Words random = {"train", "--data.train_file", folder / "tokens.bin", "--data.val_file", folder / "tokens.bin",
                        "--output.folder", folder / "random", "--model.layers", "2", "--model.heads", "3",
                        "--model.width", "12", "--model.mlp_width", "20", "--model.bias", "true", "--model.context", "11",
                        "--model.vocab", "29", "--train.batch", "4", "--train.steps", "1"};
  expect_ok(run_sheaf(random));
  const Outcome late = run_sheaf(random + Words{"--model.weights", kGpt2, "--resume"});
  EXPECT_EQ(late.code, 76) << late.err;
  EXPECT_THAT(late.err, HasSubstr("model.weights was empty: the run started from random weights"));
}

TEST(Weights, RanksMustHaveTheSame) {
  const Folder folder;
  const std::string copy = folder.copy(kGpt2, "copy0");
  folder.copy(kGpt2, "copy1");
  const std::string program = std::getenv("SHEAF_BINARY") ? std::getenv("SHEAF_BINARY") : "tools/sheaf";
  const auto launch = [&](const std::string& run) {
    std::string command = "exec " + std::filesystem::absolute(program).string();
    for (const std::string& word : folder.train(folder / "copy$RANK", run)) command += " \"" + word + "\"";
    return run_sheaf({"launch", "--nproc-per-node", "2", "--threads-per-rank", "1", "--", "sh", "-c", command + " --train.steps 1"});
  };
  expect_ok(launch("same"));  // at two places
  damage(folder / "copy1/model-00002-of-00004.safetensors");
  const Outcome r = launch("other");
  EXPECT_EQ(r.code, 64) << r.err;
  EXPECT_THAT(r.err, HasSubstr("ranks disagree: model.weights is '" + (folder / "copy0")));
}

// Adapters are trained on top of them, resumed, and merged into the export.
TEST(Weights, AdaptersAreTrainedResumedAndMerged) {
  const Folder folder;
  for (const auto& [weights, dtype] : {std::pair(kGpt2, "f32"), {kLlama, "f32"}, {kLlama, "bf16"}, {kQwen2, "f32"}, {kMixtral, "f32"},
                                       {kQwen3Next, "f32"}}) {
    SCOPED_TRACE(weights + dtype);
    const bool rounds = dtype == std::string("bf16");
    const std::string name = weights.substr(weights.rfind('/') + 1) + dtype;
    const auto at = [&](const std::string& what) { return folder / (what + name); };
    const auto train = [&](const std::string& run, const Words& more) {
      return run_sheaf(testing::on_ranks(2, folder.train(weights, run + name) + Words{"--model.lora_rank", "3", "--train.lr", "0.05",
                                                                                               "--train.dtype", dtype} + more));
    };
    const Outcome start = train("start", {"--train.steps", "0"}), whole = train("whole", {"--train.steps", "6"});
    ASSERT_EQ(start.code, 0) << start.err;
    ASSERT_EQ(whole.code, 0) << whole.err;
    EXPECT_THAT(whole.out, HasSubstr(" of them trained"));
    expect_ok(train("parts", {"--train.steps", "3"}));
    const Outcome other = train("parts", {"--train.steps", "6", "--resume", "--model.lora_alpha", "8"});
    EXPECT_EQ(other.code, 76) << other.err;
    EXPECT_THAT(other.err, HasSubstr("model.lora_alpha was 16"));
    expect_ok(run_sheaf(testing::on_ranks(2, {"train", "--resume", "--output.folder", at("parts"), "--train.steps", "6"})));
    testing::expect_same_curve(testing::read_metrics(at("parts") + "/metrics.jsonl"), testing::read_metrics(at("whole") + "/metrics.jsonl"),
                               "resumed");
    expect_ok(run_sheaf({"export", at("whole"), at("published"), "--format", "huggingface"}));
    const Outcome merged = run_sheaf(folder.train(at("published"), "merged" + name) + Words{"--train.steps", "0"});
    ASSERT_EQ(merged.code, 0) << merged.err;
    EXPECT_LT(last_loss(whole.out), last_loss(start.out) - 0.01);
    EXPECT_NEAR(last_loss(merged.out), last_loss(whole.out), rounds ? 1e-2 : 2e-6);
    EXPECT_EQ(SafetensorsFile::open(at("published") + "/model.safetensors").tensors().begin()->second.dtype, rounds ? kBF16 : kF32);
    EXPECT_THAT(File::open(at("published") + "/config.json").read_all(),
                HasSubstr(rounds ? "\"torch_dtype\":\"bfloat16\"" : "\"torch_dtype\":\"float32\""));
  }
  const Outcome random = run_sheaf({"train", "--data.train_file", folder / "tokens.bin", "--data.val_file", folder / "tokens.bin",
                                    "--output.folder", folder / "random", "--model.vocab", "29", "--model.lora_rank", "3"});
  EXPECT_EQ(random.code, 64) << random.err;
  EXPECT_THAT(random.err, HasSubstr("lora_rank 3 trains adapters of weights that stay as they are; model.weights"));
}

/// A tensor of a file, f32.
std::vector<float> values(const std::string& path, const std::string& name) {
  const auto file = SafetensorsFile::open(path);
  std::vector<float> out(static_cast<size_t>(file.at(name).shape.numel()));
  file.read(name, 0, std::ssize(out), out.data());
  return out;
}

// As separate files they contain what is added to the weights, with PEFT's names.
TEST(Weights, AdaptersAreExportedForPeft) {
  struct Case {
    std::string weights, layer, kinds;
    int64_t in;
    bool transposed;
  };
  for (const Case& c :
       {Case{kGpt2, "transformer.h.1.attn.c_attn", R"(["attn.c_attn","attn.c_proj","mlp.c_fc","mlp.c_proj"])", 12, true},
        Case{kScaled, "model.layers.1.self_attn.k_proj",
             R"(["mlp.down_proj","mlp.gate_proj","mlp.up_proj","self_attn.k_proj","self_attn.o_proj","self_attn.q_proj","self_attn.v_proj"])", 16,
             false}}) {
    SCOPED_TRACE(c.weights);
    const Folder folder;
    expect_ok(run_sheaf(folder.train(c.weights, "run") + Words{"--model.lora_rank", "3", "--train.lr", "0.05", "--train.steps", "4"}));
    expect_ok(run_sheaf({"export", folder / "run", folder / "adapters", "--format", "peft"}));
    expect_ok(run_sheaf({"export", folder / "run", folder / "merged", "--format", "huggingface"}));
    expect_ok(run_sheaf(folder.train(c.weights, "base") + Words{"--train.steps", "1", "--train.lr", "0"}));
    expect_ok(run_sheaf({"export", folder / "base", folder / "same", "--format", "huggingface"}));
    const Json config = Json::parse(File::open(folder / "adapters/adapter_config.json").read_all(), "adapter_config.json");
    EXPECT_EQ(config.at("r").as_int(), 3);
    EXPECT_EQ(config.at("lora_alpha").as_double(), 16);
    EXPECT_EQ(config.at("base_model_name_or_path").as_string(), c.weights);
    EXPECT_EQ(config.at("fan_in_fan_out").as_bool(), c.transposed);
    EXPECT_EQ(config.at("target_modules").dump(), c.kinds);
    const std::string adapters = folder / "adapters/adapter_model.safetensors", name = "base_model.model." + c.layer;
    const auto a = values(adapters, name + ".lora_A.weight"), b = values(adapters, name + ".lora_B.weight"),
               merged = values(folder / "merged/model.safetensors", c.layer + ".weight"),
               base = values(folder / "same/model.safetensors", c.layer + ".weight");
    const int64_t out = std::ssize(b) / 3;
    ASSERT_EQ(std::ssize(a), 3 * c.in);
    ASSERT_EQ(std::ssize(merged), out * c.in);
    double most = 0;
    for (int64_t o = 0; o < out; ++o)
      for (int64_t i = 0; i < c.in; ++i) {
        double added = 0;
        for (int64_t r = 0; r < 3; ++r) added += 16.0 / 3 * b[static_cast<size_t>(o * 3 + r)] * a[static_cast<size_t>(r * c.in + i)];
        const auto place = static_cast<size_t>(c.transposed ? i * out + o : o * c.in + i);
        EXPECT_NEAR(merged[place], base[place] + added, 1e-6);
        most = std::max(most, std::abs(added));
      }
    EXPECT_GT(most, 1e-3);
    const Outcome mixed = run_sheaf({"export", folder / "run", folder / "merged", "--format", "peft"});
    EXPECT_EQ(mixed.code, 64) << mixed.err;
    EXPECT_THAT(mixed.err, HasSubstr("merged/config.json': adapters and a model want folders of their own"));
    const Outcome alone = run_sheaf(folder.train(folder / "adapters", "alone") + Words{"--model.vocab", "29"});
    EXPECT_EQ(alone.code, 64) << alone.err;
    EXPECT_THAT(alone.err, HasSubstr("adapter_model.safetensors holds adapters alone"));
    const Outcome none = run_sheaf({"export", folder / "base", folder / "none", "--format", "peft"});
    EXPECT_EQ(none.code, 64) << none.err;
    EXPECT_THAT(none.err, HasSubstr("--format peft is for adapters, and this run has none (model.lora_rank)"));
  }
  // `peft` would take those of shared experts for the routed ones'.
  {
    const Folder folder;
    expect_ok(run_sheaf(folder.train(kDots1, "run") + Words{"--model.lora_rank", "3", "--model.lora_layers", "mlp", "--train.steps", "1"}));
    const Outcome shared = run_sheaf({"export", folder / "run", folder / "adapters", "--format", "peft"});
    EXPECT_EQ(shared.code, 64) << shared.err;
    EXPECT_THAT(shared.err, HasSubstr("of a mixture's model_type for one of experts'"));
    expect_ok(run_sheaf(folder.train(kDots1, "other") + Words{"--model.lora_rank", "3", "--model.lora_layers", "attention", "--train.steps", "1"}));
    expect_ok(run_sheaf({"export", folder / "other", folder / "of_attention", "--format", "peft"}));
  }
  // Nor has it other experts to take those of a model without any for, but goes by the model_type.
  {
    const Folder folder;
    expect_ok(run_sheaf({"train", "--model.type", "llama", "--model.kv_lora_rank", "8", "--model.width", "16", "--model.layers", "1",
                         "--model.heads", "2", "--model.context", "8", "--model.vocab", "29", "--data.train_file", folder / "tokens.bin",
                         "--data.val_file", folder / "tokens.bin", "--train.batch", "4", "--train.steps", "1", "--output.folder", folder / "base"}));
    expect_ok(run_sheaf({"export", folder / "base", folder / "weights", "--format", "huggingface"}));
    expect_ok(run_sheaf(folder.train(folder / "weights", "run") + Words{"--model.lora_rank", "3", "--train.steps", "1"}));
    const Outcome dense = run_sheaf({"export", folder / "run", folder / "adapters", "--format", "peft"});
    EXPECT_EQ(dense.code, 64) << dense.err;
    EXPECT_THAT(dense.err, HasSubstr("of a mixture's model_type for one of experts'"));
  }
  // Layers of models of images and text have other names there.
  {
    const Folder folder;
    const std::string weights = "tests/models/published/gemma3_bf16_images";
    expect_ok(run_sheaf(folder.train(weights, "run") + Words{"--model.lora_rank", "3", "--train.steps", "1"}));
    const Outcome images = run_sheaf({"export", folder / "run", folder / "adapters", "--format", "peft"});
    EXPECT_EQ(images.code, 64) << images.err;
    EXPECT_THAT(images.err, HasSubstr("gemma3_bf16_images/config.json' is of a model of images and text"));
  }
  // If one published tensor is several of ours, each has its own adapters.
  const Folder folder;
  expect_ok(run_sheaf(folder.train(kQwen3Next, "run") + Words{"--model.lora_rank", "3", "--train.steps", "1"}));
  const Outcome several = run_sheaf({"export", folder / "run", folder / "adapters", "--format", "peft"});
  EXPECT_EQ(several.code, 64) << several.err;
  EXPECT_THAT(several.err, HasSubstr("--format peft: model.layers.0.linear_attn.in_proj_qkvz.weight is several of the model's tensors"));
}

/// Names of text models' tensors in files of image models: text models are written separately.
bool is_of_text(const std::string& name) { return name.find("language_model") != std::string::npos; }
/// Removes the prefix "model.language_model." or, of the same length, "language_model.model.".
std::string without_images(const std::string& name) { return "model." + name.substr(std::string("model.language_model.").size()); }

TEST(Weights, ExportAndImportAreInverse) {
  const Folder folder;
  for (const std::string& weights : {kGpt2, kBase, kLlama, kScaled, kQwen2, kQwen3, kYarn, kMixtral, kQwen3Moe, kDots1, kDeepseek2, kDeepseek3,
                                     kGemma, kGemma3, kGptOss, kMxfp4, kQwen3Next, kQwen35, kQwen35Moe, kGemma3Images, kGlm, kKimi, kSmol,
                                     kPhi3})
    for (int world : {1, 3}) {
      SCOPED_TRACE(str(weights, " on ", world));
      const std::string name = str(world, weights.substr(weights.rfind('/') + 1));
      const auto at = [&](const std::string& what) { return folder / (what + name); };
      const bool mtp = weights == kDeepseek3 && world == 3;
      const Words model = mtp ? Words{"--model.mtp_layers", "2"} : Words{};
      expect_ok(run_sheaf(testing::on_ranks(world, folder.train(weights, "run" + name) + Words{"--train.steps", "2"} + model)));
      expect_ok(run_sheaf({"export", at("run"), at("published"), "--format", "huggingface"}));
      // A step with a learning rate of 0 changes nothing.
      expect_ok(run_sheaf(testing::on_ranks(4 - world, folder.train(at("published"), "again" + name) +
          Words{"--train.steps", "1", "--train.lr", "0", "--train.weight_decay", "0"} + model)));
      expect_ok(run_sheaf({"export", at("run"), at("one") + ".safetensors"}));
      expect_ok(run_sheaf({"export", at("again"), at("two") + ".safetensors"}));
      EXPECT_TRUE(tensors(at("one") + ".safetensors") == tensors(at("two") + ".safetensors"));
      if (weights == kScaled) {
        EXPECT_THAT(File::open(at("published") + "/config.json").read_all(),
                    HasSubstr(R"("rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,)"
                              R"("high_freq_factor":4.0,"original_max_position_embeddings":32})"));
      }
      // The written names are those that were read.
      const auto written = tensors(at("published") + "/model.safetensors");
      if (weights == kBase) continue;  // names without prefix, and masks
      const bool images = weights == kQwen35 || weights == kGemma3Images;
      size_t read = 0;
      for (const auto& entry : std::filesystem::directory_iterator(weights))
        if (const std::string file = entry.path().filename().string(); file.starts_with("model") && file.ends_with(".safetensors"))
          for (const auto& [name_there, bytes] : tensors(entry.path())) {
            if (name_there.ends_with("_scales") || name_there.ends_with("_scale_inv")) continue;
            std::string tensor = name_there.substr(0, name_there.find("_blocks"));  // written as values
            if (images && !is_of_text(name_there)) continue;
            if (images) tensor = without_images(tensor);
            if (weights == kQwen35Moe && tensor.ends_with("experts.down_proj")) continue;
            if (weights == kQwen35Moe && tensor.ends_with("experts.gate_up_proj")) {  // written for each expert
              for (int64_t e = 0; e < 5; ++e)
                for (const char* part : {"gate", "up", "down"}) {
                  EXPECT_TRUE(written.contains(str(tensor.substr(0, tensor.rfind('.') + 1), e, '.', part, "_proj.weight")));
                  ++read;
                }
              continue;
            }
            const bool further = tensor.starts_with("model.layers.3.") || tensor.starts_with("model.layers.4.");
            if ((weights == kDeepseek3 || weights == kGlm) && further && !mtp) continue;
            EXPECT_TRUE(written.contains(tensor)) << tensor;
            ++read;
          }
      EXPECT_EQ(read, written.size());
    }
}

// Where rows are permuted and norms are stored minus 1, the written tensors equal those that were read, bitwise.
TEST(Weights, WhatWasReadIsWritten) {
  const Folder folder;
  for (const std::string& weights : {kGptOss, kQwen3Next, kQwen35, kGlm}) {
    const std::string name = weights.substr(weights.rfind('/') + 1);
    const Words mtp = weights == kGlm ? Words{"--model.mtp_layers", "1"} : Words{};
    expect_ok(run_sheaf(testing::on_ranks(2, folder.train(weights, name) + mtp +
        Words{"--train.steps", "1", "--train.lr", "0", "--train.weight_decay", "0"})));
    expect_ok(run_sheaf({"export", folder / name, folder / (name + "_hf"), "--format", "huggingface"}));
    const std::string to = folder / (name + "_hf/model.safetensors");
    const auto file = SafetensorsFile::open(weights + "/model.safetensors"), written = SafetensorsFile::open(to);
    for (const auto& [name_there, entry] : file.tensors()) {
      if (weights == kQwen35 && !is_of_text(name_there)) continue;
      const std::string tensor = weights == kQwen35 ? without_images(name_there) : name_there;
      std::vector<bf16> read(static_cast<size_t>(entry.shape.numel()));
      file.read(name_there, 0, std::ssize(read), read.data());
      EXPECT_EQ(written.at(tensor).shape, entry.shape) << tensor;
      EXPECT_EQ(values(to, tensor), std::vector<float>(read.begin(), read.end())) << tensor;
    }
  }
}

// Readers compute LongRoPE's amplitude from the contexts in Phi-3's config.json, which are therefore kept by a run on shorter texts.
TEST(Weights, ContextsOfLongropeAreExportedAsTheyWere) {
  const Folder folder;
  const auto config_in = [](const std::string& path) { return Json::parse(File::open(path + "/config.json").read_all(), "config.json"); };
  for (const char* context : {"8", "9"}) {
    expect_ok(run_sheaf(folder.train(kPhi3, str("run", context)) + Words{"--train.steps", "1", "--model.context", context}));
    expect_ok(run_sheaf({"export", folder / str("run", context), folder / str("hf", context), "--format", "huggingface"}));
    const Json config = config_in(folder / str("hf", context)), theirs = config_in(kPhi3);
    for (const char* key : {"model_type", "rope_theta", "max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor",
                            "tie_word_embeddings"})
      EXPECT_EQ(config.at(key), theirs.at(key)) << key;
    EXPECT_EQ(config.at("rope_scaling").as_object().size(), 3u);
    for (const char* key : {"type", "short_factor", "long_factor"}) EXPECT_EQ(config.at("rope_scaling").at(key), theirs.at("rope_scaling").at(key));
    const Outcome tape = run_sheaf({"tape", "--model.weights", kPhi3, "--model.context", context, "--format", "json", "--world", "2"});
    ASSERT_EQ(tape.code, 0) << tape.err;
    EXPECT_THAT(tape.out, HasSubstr(context == std::string("8") ? "longrope's short factors 1 to 1.5 times 1.236"
                                                                : "longrope's long factors 1.125 to 8.5 times 1.236"));
  }
}

// A user who continues with `transformers` finds the other files of the weights' folder, and the same end tokens.
TEST(Weights, WhatLiesBesideThemIsExported) {
  const Folder folder;
  const std::string from = folder / "from";
  std::filesystem::copy("tests/models/published/mistral_f32_window", from, std::filesystem::copy_options::recursive);
  write_file(from + "/generation_config.json", "{\"eos_token_id\": [0, 3]}");
  write_file(from + "/chat_template.jinja", "{{ messages }}");
  const Json theirs = Json::parse(File::open(from + "/config.json").read_all(), "config.json");
  const auto train = [&](const std::string& out) {
    return run_sheaf(folder.train(from, out) + Words{"--train.steps", "1", "--model.context", "4", "--data.separate_documents", "true",
                                                     "--data.end_of_text", "7"});
  };
  std::string said;
  const auto exported = [&](const std::string& out) {
    const Outcome r = run_sheaf({"export", folder / out, folder / (out + "_hf"), "--format", "huggingface"});
    expect_ok(r);
    said = r.out;
    return Json::parse(File::open(folder / (out + "_hf/config.json")).read_all(), "config.json");
  };
  ASSERT_EQ(train("beside").code, 0);
  const Json config = exported("beside");
  EXPECT_EQ(config.at("eos_token_id"), theirs.at("eos_token_id"));
  EXPECT_EQ(config.at("max_position_embeddings"), theirs.at("max_position_embeddings"));
  EXPECT_GT(theirs.at("max_position_embeddings").as_int(), 4);
  EXPECT_EQ(File::open(folder / "beside_hf/generation_config.json").read_all(), "{\"eos_token_id\": [0, 3]}");
  EXPECT_EQ(File::open(folder / "beside_hf/chat_template.jinja").read_all(), "{{ messages }}");
  EXPECT_FALSE(path_exists(folder / "beside_hf/special_tokens_map.json"));
  EXPECT_THAT(said, Not(AnyOf(HasSubstr("from before"), HasSubstr("no longer there"))));
  // A null there says nothing: exports of ours have it.
  Json unsaid = theirs;
  unsaid.set("eos_token_id", Json());
  write_file(from + "/config.json", unsaid.dump());
  EXPECT_EQ(exported("beside").at("eos_token_id"), Json(7));
  // Without the weights, what the run itself knows.
  std::filesystem::remove_all(from);
  const Json alone = exported("beside");
  EXPECT_EQ(alone.at("eos_token_id"), Json(7));
  EXPECT_EQ(alone.at("max_position_embeddings"), Json(4));
  EXPECT_THAT(said, HasSubstr(", without what was next to '" + from + "', which is no longer there, next to generation_config.json, "
                              "chat_template.jinja from before, which may not fit them, of "));
}

// MTP layers get initial values if the files have none, and are dropped if the architecture has none.
TEST(Weights, WithoutLayersForFurtherTokens) {
  const Folder folder;
  expect_ok(run_sheaf(folder.train(kLlama, "run") + Words{"--train.steps", "2", "--model.mtp_layers", "1"}));
  const Outcome r = run_sheaf({"export", folder / "run", folder / "published", "--format", "huggingface"});
  EXPECT_THAT(r.out, HasSubstr(", without model.mtp_layers, which are published with DeepSeek-V3's and GLM-4.5's mixtures alone, of "));
  for (const auto& [name, bytes] : tensors(folder / "published/model.safetensors")) EXPECT_EQ(name.find("layers.2."), std::string::npos) << name;
  EXPECT_EQ(run_sheaf({"export", folder / "run", folder / "own.safetensors"}).code, 0);
  EXPECT_TRUE(tensors(folder / "own.safetensors").contains("mtp_layers.0.join.weight"));
}

// Our own models can be published: biases that GPT-2 has and ours lack are zeros.
TEST(Weights, ATrainedModelIsExported) {
  const Folder folder;
  const Words own = {"train", "--data.train_file", folder / "tokens.bin", "--data.val_file", folder / "tokens.bin",
                     "--output.folder", folder / "run", "--model.layers", "1", "--model.heads", "2", "--model.width", "8",
                     "--model.vocab", "29", "--model.context", "6", "--train.batch", "4", "--train.steps", "2"};
  const Outcome trained = run_sheaf(own);
  ASSERT_EQ(trained.code, 0) << trained.err;
  expect_ok(run_sheaf({"export", folder / "run", folder / "published", "--format", "huggingface"}));
  const Outcome r = run_sheaf(folder.train(folder / "published", "again") + Words{"--train.steps", "0"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_NEAR(last_loss(r.out), last_loss(trained.out), 1e-6);
  // The other format has other names.
  expect_ok(run_sheaf({"export", folder / "run", folder / "own.safetensors"}));
  const Outcome own_names = run_sheaf(folder.train(folder / "own.safetensors", "other") + Words{"--model.vocab", "29"});
  EXPECT_EQ(own_names.code, 65);
  EXPECT_THAT(own_names.err, HasSubstr("export it with --format huggingface"));
  const Outcome unknown = run_sheaf({"export", folder / "run", folder / "x", "--format", "onnx"});
  EXPECT_EQ(unknown.code, 64);
  EXPECT_THAT(unknown.err, HasSubstr("unknown format 'onnx'; known: sheaf, huggingface"));
  // Token files have no tokenizer, whichever tokenizer the weights have.
  const Outcome text = run_sheaf({"generate", folder / "run"});
  EXPECT_EQ(text.code, 64);
  EXPECT_THAT(text.err, HasSubstr("it has no tokenizer"));
}

}  // namespace
}  // namespace sheaf
