// Quantized weights as a user meets them: adapters trained on them, evaluation and generation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "sheaf/core/file.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::last_number;
using testing::Outcome;
using testing::run_sheaf;
using testing::operator+;
using testing::Words;

struct Folder : ScratchFolder {
  Folder() { testing::write_sample_tokens(*this / "tokens.bin"); }
  Words train(const std::string& run, const Words& more) const {
    return Words{"train", "--data.train_file", *this / "tokens.bin", "--data.val_file", *this / "tokens.bin", "--output.folder", *this / run,
                 "--train.batch", "4", "--train.warmup", "0", "--train.schedule", "constant", "--train.eval_every", "3"} + more;
  }
  /// Published weights of a model whose rows are whole blocks.
  std::string base(const std::string& type) const {
    Words model = {"--model.type", type == "mixture" ? "llama" : type, "--model.layers", "2", "--model.heads", type == "gpt2" ? "1" : "2", "--model.width", "64",
                   "--model.vocab", "29", "--model.context", "13", "--model.mlp_width", type == "gpt2" ? "256" : "128", "--train.steps", "3"};
    if (type != "gpt2") model = model + Words{"--model.head_dim", "64"};
    if (type == "mixture") model = model + Words{"--model.experts", "3", "--model.expert_hidden", "64", "--model.tie_embeddings", "false"};
    expect_ok(run_sheaf(train("base_run_" + type, model)));
    expect_ok(run_sheaf({"export", *this / ("base_run_" + type), *this / ("base_" + type), "--format", "huggingface"}));
    return *this / ("base_" + type);
  }
};

TEST(Quantized, AdaptersAreTrainedResumedAndMerged) {
  const Folder folder;
  for (const char* type : {"gpt2", "llama", "mixture"}) {
    const std::string base = folder.base(type);
    for (const auto& [format, dtype] : {std::pair("nf4", "f32"), {"int8", "bf16"}}) {
      SCOPED_TRACE(str(type, " ", format));
      const bool rounds = dtype == std::string("bf16");
      const std::string name = str(type, format);
      const auto train = [&](const std::string& run, const Words& more) {
        return run_sheaf(testing::on_ranks(2, folder.train(run + name, Words{"--model.weights", base, "--model.lora_rank", "3", "--train.lr", "0.002",
                                                                              "--model.quantize", format, "--train.dtype", dtype} + more)));
      };
      const Outcome start = train("start", {"--train.steps", "0"}), whole = train("whole", {"--train.steps", "6"});
      expect_ok(start);
      expect_ok(whole);
      const auto loss = [](const Outcome& r) { return last_number(r.out, "validation loss"); };
      EXPECT_LT(loss(whole), loss(start) - 1e-3);
      expect_ok(train("parts", {"--train.steps", "3"}));
      const Outcome other = train("parts", {"--train.steps", "6", "--resume", "--model.quantize", "none"});
      EXPECT_EQ(other.code, 76) << other.err;
      EXPECT_THAT(other.err, HasSubstr(str("model.quantize was \"", format, "\"")));
      expect_ok(run_sheaf(testing::on_ranks(2, {"train", "--resume", "--output.folder", folder / ("parts" + name), "--train.steps", "6"})));
      testing::expect_same_curve(testing::read_metrics(folder / ("parts" + name) + "/metrics.jsonl"),
                                 testing::read_metrics(folder / ("whole" + name) + "/metrics.jsonl"), "resumed");
      // The run's loss equals that of the quantized published weights at its start, and that of the merged weights, in its dtype, at its
      // end.
      const auto evaluated = [&](const std::string& what, const Words& more) {
        const Outcome r =
            run_sheaf(testing::on_ranks(2, Words{"evaluate", what, "--data.val_file", folder / "tokens.bin", "--train.dtype", dtype} + more));
        EXPECT_EQ(r.code, 0) << r.err;
        return last_number(r.out, "loss ");
      };
      EXPECT_NEAR(evaluated(base, {"--model.quantize", format}), loss(start), 2e-6);
      EXPECT_GT(std::abs(evaluated(base, {}) - loss(start)), 5e-7) << "blocks are not the values";
      EXPECT_NEAR(evaluated(base, {}), loss(start), 0.05);
      EXPECT_NEAR(evaluated(folder / ("whole" + name), {}), loss(whole), 2e-6);
      const std::string merged = folder / ("merged" + name);
      expect_ok(run_sheaf({"export", folder / ("whole" + name), merged, "--format", "huggingface"}));
      EXPECT_NEAR(evaluated(merged, {}), loss(whole), rounds ? 1e-2 : 2e-6);
      const auto file = SafetensorsFile::open(merged + "/model.safetensors");
      for (const auto& [tensor, entry] : file.tensors())
        EXPECT_EQ(entry.dtype, rounds ? kBF16 : kF32) << tensor;
      expect_ok(run_sheaf({"export", folder / ("whole" + name), folder / ("adapters" + name), "--format", "peft"}));
    }
  }
}

TEST(Quantized, ModelsGenerateFromBlocks) {
  const Folder folder;
  std::ofstream(folder / "text.txt") << [] {
    std::string text;
    for (int i = 0; i < 60; ++i) text += "the cat sat on the mat and the dog ran to the cat. ";
    return text;
  }();
  const std::string run = folder / "run";
  expect_ok(run_sheaf({"train", "--data.corpus", folder / "text.txt", "--output.folder", run, "--model.type", "llama", "--model.layers", "2",
                       "--model.heads", "2", "--model.width", "64", "--model.head_dim", "64", "--model.mlp_width", "128", "--model.context", "24",
                       "--train.steps", "60", "--train.lr", "5e-3", "--train.warmup", "5", "--train.batch", "8"}));
  const auto says = [&](const Words& more) {
    const Outcome r =
        run_sheaf(Words{"generate", run, "--generate.prompt", "the cat ", "--generate.tokens", "40", "--generate.temperature", "0"} + more);
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  EXPECT_EQ(says({"--generate.quantize", "int8"}), says({}));
  EXPECT_EQ(says({"--generate.quantize", "nf4", "--generate.dtype", "bf16"}).size(), says({}).size());
}

TEST(Quantized, WhatCannotBeIsRefused) {
  const Folder folder;
  const auto refused = [&](const Words& words, const std::string& why) {
    const Outcome r = run_sheaf(words);
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr(why));
  };
  const std::string base = folder.base("llama");
  refused(folder.train("run", {"--model.weights", base, "--model.quantize", "nf4"}),
          "quantize nf4: all weights are trained; only those with adapters");
  refused(folder.train("run", {"--model.weights", base, "--model.lora_rank", "3", "--model.quantize", "int4"}), "model.quantize");
  refused({"evaluate", "tests/models/published/llama_bf16_shards", "--data.val_file", folder / "tokens.bin", "--model.quantize", "nf4"},
          "[32,16]: rows in blocks (nf4) are multiples of 64 elements");
  expect_ok(run_sheaf(folder.train("fours", {"--model.weights", base, "--model.lora_rank", "3", "--model.quantize", "nf4", "--train.steps", "1"})));
  refused({"evaluate", folder / "fours", "--data.val_file", folder / "tokens.bin", "--model.quantize", "int8"}, "quantize int8: the weights in '");
}

}  // namespace
}  // namespace sheaf
