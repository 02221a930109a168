// Questions that a run answers during training, and `sheaf evaluate`, as a user runs them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kGpt2 = "tests/models/published/gpt2_f32_shards", kLlama = "tests/models/published/llama_bf16_shards",
                  kQuestions = "tests/models/two_questions.jsonl";

std::string line_with(const std::string& out, const std::string& word) {
  for (const std::string& line : lines_of(out))
    if (line.find(word) != std::string::npos) return line;
  return "no line with " + word + " in " + out;
}

/// With a run on bytes, and tokens in the vocabulary of the published models.
struct Folder : CorpusFolder {
  Folder() {
    write_sample_tokens(*this / "tokens.bin");
    // The model has learned next to nothing, so its answers are practically random.
    const std::string text = sample_text(9000);
    std::ofstream many(*this / "many.jsonl");
    for (size_t i = 0; i < 60; ++i) {
      const auto words = [&](size_t at, size_t n) {
        std::string part = text.substr(i * 140 + at, n);
        std::ranges::replace(part, '\n', ' ');
        return part;
      };
      many << R"({"prompt": "x)" << words(0, 3 + i % 9) << R"(", "choices": ["y)" << words(20, 5) << R"(", "y)" << words(40, 1 + i % 7) << R"(", "y)"
           << words(60, 3 + i % 5) << R"("], "answer": )" << i % 3 << "}\n";
    }
  }
  Outcome train(const std::string& out, const Words& more, int world = 1) const {
    return run_sheaf(on_ranks(world, Words{"train"} + kTinyRun + data(out) + Words{"--data.tokenizer", "byte"} + more));
  }
};

Words evaluate(const std::string& folder, const Words& more = {}) { return Words{"evaluate", folder} + more; }

double loss_in(const std::string& out) {
  const size_t at = out.find("\nloss ");
  return at == std::string::npos ? -1 : std::stod(out.substr(at + 6));
}

// MTP layers draft, which changes no text, and are loaded for nothing else.
TEST(Evaluate, LayersForFurtherTokensDraft) {
  const Folder folder;
  const Outcome trained = folder.train("run", {"--model.type", "llama", "--model.mtp_layers", "2"}, 2);
  ASSERT_EQ(trained.code, 0) << trained.err;
  const auto logged = folder.metrics("run").at(5);
  EXPECT_NEAR(std::stod(logged.at("loss")), std::stod(logged.at("mtp_loss")), 1);  // both for one token, of a nearly untrained model
  const auto text = [&](int drafts, const Words& more = {}) {
    const Outcome r = run_sheaf(Words{"generate", folder / "run", "--generate.tokens", "30", "--generate.drafts", std::to_string(drafts)} + more);
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  for (const Words& more : {Words{}, Words{"--generate.dtype", "bf16"}, Words{"--generate.temperature", "0"}}) {
    EXPECT_EQ(text(1, more), text(0, more));
    EXPECT_EQ(text(9, more), text(0, more));
  }
  const Outcome r = run_sheaf(evaluate(folder / "run", {"--data.corpus", folder / "corpus.txt"}));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_GT(loss_in(r.out), 1);
  EXPECT_EQ(run_sheaf({"generate", folder / "run", "--generate.drafts", "-1"}).code, 64);
}

TEST(Evaluate, ARunAnswersQuestionsWhileItTrains) {
  const Folder folder;
  const Words sets = {"--data.choices", "one=" + kQuestions + " two=" + kQuestions};
  const Outcome r = folder.train("run", sets);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out,
              ContainsRegex("step 2  validation loss [0-9.]+  accuracy of one [01].[05]000, norm [01].[05]000  accuracy of two [01].[05]000, norm "));
  EXPECT_THAT(r.out, ContainsRegex("\naccuracy of one [01].[05]000, norm [01].[05]000\naccuracy of two "));
  const Metrics metrics = folder.metrics("run");
  for (const int64_t step : {2, 4, 5})
    for (const char* key : {"accuracy_one", "norm_accuracy_one", "accuracy_two", "norm_accuracy_two"})
      EXPECT_TRUE(metrics.at(step).contains(key)) << step << key;
  // Ranks, each of which may get questions, give the same answers; training is unaffected by them.
  const Outcome two = folder.train("two", sets, 2), without = folder.train("without", {}, 2);
  ASSERT_EQ(two.code, 0) << two.err;
  ASSERT_EQ(without.code, 0) << without.err;
  expect_same_curve(folder.metrics("two"), folder.metrics("without"), "with questions");
  EXPECT_EQ(folder.metrics("two").at(5).at("norm_accuracy_one"), metrics.at(5).at("norm_accuracy_one"));
  // A single set needs no name, and only the first questions may be asked.
  const Outcome first = folder.train("first", {"--data.choices", kQuestions, "--train.eval_questions", "1"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, ContainsRegex("validation loss [0-9.]+  accuracy [01].0000, norm [01].0000\n"));
  EXPECT_TRUE(folder.metrics("first").at(5).contains("accuracy"));
}

TEST(Evaluate, ARunOnItsOwnData) {
  const Folder folder;
  const Outcome trained = folder.train("run", {"--data.choices", folder / "many.jsonl"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.out, HasSubstr("\n  to answer in evaluations: 60 questions"));
  const std::string last = folder.metrics("run").at(5).at("val_loss");
  const Outcome r = run_sheaf(evaluate(folder / "run"));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("sheaf evaluate: 1 rank, "));
  EXPECT_THAT(r.out, HasSubstr(" parameters of " + (folder / "run/checkpoints/step-") ));
  EXPECT_THAT(r.out, HasSubstr(", f32, windows of 16 tokens\n"));
  EXPECT_NEAR(loss_in(r.out), std::stod(last), 1e-6);
  EXPECT_THAT(r.out, HasSubstr("  (nats per token, of 150)\naccuracy "));
  const std::string accuracy = line_with(r.out, "accuracy");
  EXPECT_THAT(accuracy, HasSubstr("  (60 questions"));
  char said[64];
  std::snprintf(said, sizeof said, "accuracy %.4f, norm %.4f  (", std::stod(folder.metrics("run").at(5).at("accuracy")),
                std::stod(folder.metrics("run").at(5).at("norm_accuracy")));
  EXPECT_THAT(accuracy, ::testing::StartsWith(said));
  // However the model is cut, and whatever the run was; all targets or the requested number.
  const Words whole = {"--train.eval_tokens", "0"};
  const double loss = loss_in(run_sheaf(evaluate(folder / "run", whole)).out);
  EXPECT_GT(std::abs(loss - std::stod(last)), 1e-6);
  for (const auto& [world, options] : {std::pair<int, Words>{3, {}}, {2, {"--sharding.tensor", "2"}}, {2, {"--sharding.context", "2"}},
                                       {3, {"--sharding.pipeline", "3"}}, {2, {"--sharding.strategy", "replicate"}}}) {
    const Outcome ranks = run_sheaf(on_ranks(world, evaluate(folder / "run", whole + options)));
    ASSERT_EQ(ranks.code, 0) << ranks.err;
    EXPECT_THAT(ranks.out, HasSubstr("sheaf evaluate: " + std::to_string(world) + " ranks, "));
    EXPECT_NEAR(loss_in(ranks.out), loss, 1e-5);
    EXPECT_EQ(line_with(ranks.out, "accuracy"), accuracy);
    EXPECT_EQ(lines_of(ranks.out).size(), 3u) << "rank 0 alone speaks: " << ranks.out;
  }
  const Outcome bf16 = run_sheaf(evaluate(folder / "run", whole + Words{"--train.dtype", "bf16"}));
  EXPECT_NEAR(loss_in(bf16.out), loss, 0.05);
  EXPECT_NE(loss_in(bf16.out), loss);
  EXPECT_THAT(bf16.out, HasSubstr(", bf16, windows"));
}

// In the precision of the run's validation, or without FP8.
TEST(Evaluate, ARunInFp8) {
  const Folder folder;
  const Outcome trained = folder.train("run", {"--train.fp8", "all"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::string rounded = run_sheaf(evaluate(folder / "run")).out,
                    exact = run_sheaf(evaluate(folder / "run", {"--train.fp8", "none"})).out;
  EXPECT_THAT(rounded, HasSubstr(", f32, products in FP8, windows of 16 tokens\n"));
  EXPECT_THAT(exact, HasSubstr(", f32, windows of 16 tokens\n"));
  EXPECT_NEAR(loss_in(rounded), std::stod(folder.metrics("run").at(5).at("val_loss")), 1e-6);
  EXPECT_NE(loss_in(exact), loss_in(rounded));
  EXPECT_NEAR(loss_in(exact), loss_in(rounded), 0.02);
}

TEST(Evaluate, OnOtherData) {
  const Folder folder;
  ASSERT_EQ(folder.train("run", {}).code, 0);
  std::ofstream(folder / "other.txt") << sample_text(900);
  const Words tokenize = {"tokenize", folder / "other.txt", folder / "other.bin", "--tokenizer", "byte"};
  ASSERT_EQ(run_sheaf(tokenize).code, 0);
  const Outcome file = run_sheaf(evaluate(folder / "run", {"--data.val_file", "x=" + (folder / "other.bin") + " y=" + (folder / "other.bin"),
                                                           "--train.eval_tokens", "0"}));
  ASSERT_EQ(file.code, 0) << file.err;
  EXPECT_THAT(file.out, ContainsRegex("\nloss of x [0-9.]+, perplexity [0-9.]+  .nats per token, of 899.\nloss of y "));
  EXPECT_THAT(file.out, Not(HasSubstr("accuracy")));
  // A whole text, or its tail.
  const Words text = {"--data.corpus", folder / "other.txt", "--train.eval_tokens", "0"};
  EXPECT_THAT(run_sheaf(evaluate(folder / "run", text)).out, HasSubstr(", of 899)"));
  EXPECT_THAT(run_sheaf(evaluate(folder / "run", text + Words{"--data.val_fraction", "0.5"})).out, HasSubstr(", of 449)"));
  // Questions alone.
  const Outcome asked = run_sheaf(evaluate(folder / "run", {"--data.choices", folder / "many.jsonl"}));
  ASSERT_EQ(asked.code, 0) << asked.err;
  EXPECT_THAT(asked.out, Not(HasSubstr("loss")));
  // Shorter windows give less context.
  const Words one = {"--data.val_file", folder / "other.bin", "--train.eval_tokens", "0"};
  const Outcome longer = run_sheaf(evaluate(folder / "run", one)), shorter = run_sheaf(evaluate(folder / "run", one + Words{"--context", "4"}));
  EXPECT_THAT(longer.out, HasSubstr("windows of 16 tokens"));
  EXPECT_THAT(shorter.out, HasSubstr("windows of 4 tokens"));
  EXPECT_NE(loss_in(shorter.out), loss_in(longer.out));
}

TEST(Evaluate, PublishedWeights) {
  const Folder folder;
  const Words tokens = {"--data.val_file", folder / "tokens.bin"};
  for (const std::string& weights : {kGpt2, kLlama}) {
    const Outcome r = run_sheaf(evaluate(weights, tokens)), ranks = run_sheaf(on_ranks(2, evaluate(weights, tokens)));
    ASSERT_EQ(r.code, 0) << r.err;
    ASSERT_EQ(ranks.code, 0) << ranks.err;
    EXPECT_GT(loss_in(r.out), 0);
    EXPECT_NEAR(loss_in(ranks.out), loss_in(r.out), 1e-5);
    // Equal to that of a run that starts from them, before it has learned anything.
    const Outcome run = run_sheaf(Words{"train", "--model.weights", weights, "--data.train_file", folder / "tokens.bin", "--output.folder",
                                        folder / "from_" + std::to_string(weights.size()), "--train.steps", "1", "--train.lr", "0"} + tokens);
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_NEAR(loss_in(r.out), std::stod(run.out.substr(run.out.rfind("validation loss") + 15)), 1e-5);
  }
  // Ranks that look at other weights, or at a run, are an error.
  ASSERT_EQ(folder.train("run", {}).code, 0);
  for (const std::string& other : {kLlama, folder / "run"}) {
    const Outcome mixed =
        run_sheaf({"launch", "--nproc-per-node", "2", "--", "sh", "-c",
                   "if [ $RANK = 0 ]; then folder=" + kGpt2 + "; else folder=" + other + "; fi; exec \"$0\" evaluate $folder \"$@\"",
                   std::getenv("SHEAF_BINARY") ? std::getenv("SHEAF_BINARY") : "tools/sheaf", "--data.val_file", folder / "tokens.bin"});
    EXPECT_EQ(mixed.code, 64) << mixed.out << mixed.err;
    EXPECT_THAT(mixed.err, HasSubstr("ranks disagree"));
  }
  const Outcome words = run_sheaf(evaluate(kGpt2, {"--data.choices", kQuestions}));
  expect_refused(words, 64, Words{"data.choices", "has neither tokenizer.json nor"});
}

// Tokens need no tokenizer, so one that Sheaf does not support is an error only for texts.
TEST(Evaluate, BesideATokenizerThatCannotBeRead) {
  const Folder folder;
  const std::string weights = folder / "weights";
  std::filesystem::copy(kLlama, weights);
  std::ofstream(weights + "/tokenizer.json") << R"({"model": {"type": "Unigram", "vocab": []}})";
  const Words tokens = {"--data.val_file", folder / "tokens.bin"};
  const Outcome r = run_sheaf(evaluate(weights, tokens)), same = run_sheaf(evaluate(kLlama, tokens));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(loss_in(r.out), loss_in(same.out));
  const Words train = Words{"train", "--model.weights", weights, "--data.train_file", folder / "tokens.bin", "--output.folder", folder / "run",
                            "--train.steps", "1", "--train.lr", "0"} + tokens;
  expect_refused(run_sheaf(train + Words{"--data.choices", kQuestions}), 64, Words{"data.choices", "nor can the tokenizer in", "Unigram"});
  ASSERT_EQ(run_sheaf(train).code, 0);
  const Outcome run = run_sheaf(evaluate(folder / "run"));
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_NEAR(loss_in(run.out), loss_in(r.out), 1e-5);
  for (const std::string& of : {weights, folder / "run"}) {
    expect_refused(run_sheaf(evaluate(of, {"--data.choices", kQuestions})), 65, Words{"tokenizer.json", "Unigram"});
    expect_refused(run_sheaf({"generate", of}), 65, Words{"tokenizer.json", "Unigram"});
  }
}

TEST(Evaluate, WhatDoesNotFitIsRefused) {
  const Folder folder;
  ASSERT_EQ(folder.train("run", {}).code, 0);
  const auto refused = [&](const Words& more, int code, const std::string& part) {
    SCOPED_TRACE(part);
    expect_refused(run_sheaf(evaluate(folder / "run", more)), code, part);
  };
  refused({"--train.lr", "1"}, 64, "--train.lr is not for evaluation");
  refused({"--model.layers", "1"}, 64, "--model.layers is not for evaluation");
  refused({"--data.choice", "x"}, 64, "did you mean");
  refused({"--data.separate_documents", "false"}, 64, "'data.separate_documents false' would change nothing: ");
  refused({"--context", "17"}, 64, "windows of 17 tokens: the model's context is 16");
  refused({"--context", "0"}, 64, "--context");
  refused({"--train.eval_questions", "3"}, 64, "without data.choices there are no questions");
  refused({"--data.val_file", folder / "none.bin"}, 65, "none.bin");
  refused({"--data.choices", folder / "none.jsonl"}, 65, "none.jsonl");
  refused({"--sharding.tensor", "2"}, 64, "sharding.tensor 2: 1 rank cannot");
  refused({"--data.corpus", "x", "--data.val_file", "y"}, 64, "exclude each other");
  refused({"--data.val_file", folder / "tokens.bin", "--data.val_fraction", "0.5"}, 64, "'data.val_fraction' would change nothing");
  refused({"--data.end_of_text", "7"}, 64, "'data.end_of_text' would change nothing");
  refused({"--sharding.min_parameters", "7"}, 64, "'sharding.min_parameters' would change nothing");
  refused({"--data.tokenizer", "byte"}, 64, "has a tokenizer");
  refused({"--data.tokenizer", "gpt2"}, 64, "needs data.tokenizer_folder");
  refused({"--train.batch", "1", "--train.micro_batches", "2"}, 64, "train.batch 1 is less than train.micro_batches 2");
  expect_refused(run_sheaf(evaluate(folder / "nothing")), 65, "no checkpoint in");
  expect_refused(run_sheaf(evaluate(kGpt2)), 64, "nothing to evaluate on");
  expect_refused(folder.train("other", {"--train.eval_questions", "3"}), 64, "without data.choices");
  std::ofstream(folder / "wrong.jsonl") << "{}\n";
  expect_refused(folder.train("other", {"--data.choices", folder / "wrong.jsonl"}), 65, Words{"line 1 of", "member \"prompt\": it is not there"});
  const Outcome tokens = run_sheaf(Words{"train"} + kTinyRun + Words{"--data.train_file", folder / "tokens.bin", "--data.val_file",
                                   folder / "tokens.bin", "--model.vocab", "40", "--data.choices", kQuestions, "--output.folder", folder / "other"});
  expect_refused(tokens, 64, Words{"data.choices", "give data.tokenizer"});
}

}  // namespace
}  // namespace sheaf::testing
