// A run's reports, and the errors for options, data or ranks that do not match each other.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

// Replicas of the model, and groups of ranks for context and tensor parallelism.
TEST(Groups, HaveTheSameBitsOverEveryTransport) {
  for (const auto& [options, said] : {std::pair<Words, std::string>{{"--sharding.replicas", "2"}, " in 2 replicas, "},
                                      {{"--sharding.context", "2"}, " over groups of 2 that share sequences, "},
                                      {{"--sharding.context", "2", "--sharding.context_comm", "all_gather"},
                                       " over groups of 2 that share sequences by all_gather, "},
                                      {{"--sharding.tensor", "2"}, " over groups of 2 that share layers, "}}) {
    CorpusFolder folder;
    const Words command = Words{"train"} + kTinyRun + options;
    const std::string& option = options.back();
    for (const char* comm : {"shm", "gloo"}) {
      const Outcome r = run_sheaf(on_ranks(4, command + folder.data(comm)), {std::string("SHEAF_COMM=") + comm});
      ASSERT_EQ(r.code, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr(std::string("4 ranks (") + comm + ") x 1 thread, full_shard" + said));
    }
    expect_same_curve(folder.metrics("gloo"), folder.metrics("shm"), option + " over Gloo");
    // A group on each of two hosts: shared memory within them.
    Words hosts = on_ranks(4, command + folder.data("hosts"));
    hosts.insert(std::find(hosts.begin(), hosts.end(), "--") + 1,
                 {"sh", "-c", "SHEAF_HOST_ID=$((RANK / 2)) exec \"$0\" \"$@\""});
    const Outcome r = run_sheaf(hosts);
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("4 ranks (shm+gloo)"));
    EXPECT_THAT(r.out, ::testing::Not(HasSubstr("DIFFERENT")));
    EXPECT_THAT(r.out, HasSubstr("(equal)"));
    expect_same_curve(folder.metrics("hosts"), folder.metrics("shm"), option + " on two hosts");
  }
}

// However the steps run, the squares of all units' or parameters' norms add up to that of the whole gradient.
TEST(Train, LogsNormsByUnitsAndByParameters) {
  CorpusFolder folder;
  for (const Words& options : {Words{"--train.log_norms", "units"}, {"--train.log_norms", "parameters", "--train.compile", "true"},
                               {"--train.log_norms", "parameters", "--sharding.pipeline", "2", "--train.micro_batches", "2"},
                               {"--train.log_norms", "units", "--train.islands", "2", "--train.inner_steps", "2", "--train.batch", "6"},
                               {"--train.log_norms", "units", "--train.islands", "2", "--train.inner_steps", "2", "--train.batch", "6", "--sharding.units",
                                "none"}}) {
    const std::string name = options.back() + std::to_string(options.size());
    const Outcome r = run_sheaf(on_ranks(2, Words{"train"} + kTinyRun + options + folder.data(name)));
    ASSERT_EQ(r.code, 0) << r.err;
    int with_norms = 0;
    for (const auto& [step, fields] : folder.metrics(name)) {
      if (!fields.contains("grad_norm")) continue;
      double squares = 0, weights = 0;
      for (const auto& [key, value] : fields) {
        if (key.starts_with("grad_norm/")) squares += std::stod(value) * std::stod(value), ++with_norms;
        if (key.starts_with("weight_norm/")) weights += std::stod(value);
      }
      // With islands these are means of norms, of which those of one unit are the gradient's.
      const bool islands = options.size() > 2 && options[2] == "--train.islands", one = options.back() == "none";
      EXPECT_NEAR(std::sqrt(squares), std::stod(fields.at("grad_norm")), islands && !one ? 0.1 : 1e-9) << name << step;
      EXPECT_GT(weights, 1) << name << step;
      EXPECT_TRUE(fields.contains(one ? "weight_norm/root" : options[1] == "units" ? "weight_norm/blocks.2" : "grad_norm/blocks.2.mlp.down.weight")) << name;
    }
    EXPECT_GT(with_norms, options.back() == "none" ? 3 : 15) << name;
  }
}

TEST(Train, TwoRanksAreOneRankWithTwoMicroBatches) {
  CorpusFolder folder;
  for (const char* batch : {"6", "5"}) {
    for (const char* dropout : {"0", "0.1"}) {
      const Words model =
          kTinyRun + Words{"--train.steps", "20", "--train.batch", batch, "--model.dropout", dropout};
      for (const char* out : {"one", "two"}) std::filesystem::remove_all(folder / out);
      Outcome r = run_sheaf(on_ranks(
          1, Words{"train"} + model + folder.data("one") + Words{"--train.micro_batches", "2"}));
      ASSERT_EQ(r.code, 0) << r.err;
      for (const char* comm : {"shm", "gloo"}) {
        std::filesystem::remove_all(folder / "two");
        r = run_sheaf(on_ranks(2, Words{"train"} + model + folder.data("two")),
                      {std::string("SHEAF_COMM=") + comm});
        ASSERT_EQ(r.code, 0) << r.err;
        EXPECT_THAT(r.out, HasSubstr(std::string("sheaf train: 2 ranks (") + comm + ")"));
        expect_same_curve(folder.metrics("two"), folder.metrics("one"),
                          std::string(comm) + ", batch " + batch + ", dropout " + dropout);
      }
    }
  }
}

TEST(Train, TensorBoardHasTheSameNumbers) {
  CorpusFolder folder;
  const Words train = Words{"train"} + kTinyRun + folder.data("run") + Words{"--output.tensorboard", "true"};
  const auto files = [&] {
    std::vector<std::string> contents;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "run/tensorboard"))
      contents.push_back(File::open(entry.path()).read_all());
    return contents;
  };
  ASSERT_EQ(run_sheaf(train).code, 0);
  ASSERT_EQ(files().size(), 1u);
  const Metrics metrics = folder.metrics("run");
  for (const auto& [name, value] : metrics.at(5)) {
    if (name == "step") continue;
    EXPECT_THAT(files()[0], HasSubstr(name));
  }
  ASSERT_EQ(run_sheaf(train + Words{"--resume"}).code, 0);
  EXPECT_EQ(files().size(), 2u) << "a resumed run begins a file of its own";
  ASSERT_EQ(run_sheaf(Words{"train"} + kTinyRun + folder.data("other")).code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder / "other/tensorboard"));
}

// A model that diverges: the lowest loss is not among the last.
TEST(Train, TheBestWeightsAreKept) {
  CorpusFolder folder;
  const auto train = [&](const std::string& out, const Words& more, int world = 1) {
    return run_sheaf(on_ranks(world, Words{"train"} + kTinyRun + folder.data(out) +
                                         Words{"--output.keep_best", "true", "--train.schedule", "constant", "--train.lr", "0.3",
                                               "--train.eval_every", "1", "--train.save_every", "2"} +
                                         more));
  };
  const auto best_of = [&](const std::string& out) {
    std::pair<double, int64_t> best{1e9, 0};
    const Metrics metrics = folder.metrics(out);
    for (const auto& [step, values] : metrics) best = std::min(best, {std::stod(values.at("val_loss")), step});
    return best;
  };
  const auto kept = [&](const std::string& out) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder / out + "/best/checkpoints")) names.push_back(entry.path().filename());
    return names;
  };
  const Outcome r = train("run", {"--train.steps", "8"});
  ASSERT_EQ(r.code, 0) << r.err;
  const auto [loss, step] = best_of("run");
  ASSERT_LT(step, 8);
  EXPECT_EQ(kept("run"), (std::vector<std::string>{"step-" + std::to_string(step)}));
  EXPECT_THAT(r.out, HasSubstr("  (after step " + std::to_string(step) + "; its weights are in " + (folder / "run/best") + ")"));
  // Only a part that keeps the best weights knows which they are.
  const Outcome without = train("run", {"--train.steps", "9", "--output.keep_best", "false", "--resume"});
  ASSERT_EQ(without.code, 0) << without.err;
  EXPECT_THAT(without.out, ::testing::Not(HasSubstr("lowest of all")));
  // Losses over other targets are not compared with its.
  const Outcome others = train("run", {"--train.steps", "9", "--train.eval_tokens", "40", "--resume"});
  EXPECT_EQ(others.code, 76) << others.err;
  EXPECT_THAT(others.err, HasSubstr("whose losses cannot be compared"));
  EXPECT_EQ(kept("run"), (std::vector<std::string>{"step-" + std::to_string(step)}));
  const Outcome evaluated = run_sheaf({"evaluate", folder / "run/best"});
  ASSERT_EQ(evaluated.code, 0) << evaluated.err;
  EXPECT_NEAR(std::stod(evaluated.out.substr(evaluated.out.find("\nloss ") + 6)), loss, 1e-5);
  EXPECT_EQ(run_sheaf({"generate", folder / "run/best", "--generate.tokens", "3"}).code, 0);
  EXPECT_EQ(run_sheaf({"export", folder / "run/best", folder / "best.safetensors"}).code, 0);
  // A run that resumes after it, on other ranks, still knows the best step.
  ASSERT_LT(step, 7);
  ASSERT_EQ(train("parts", {"--train.steps", std::to_string(step + 1)}).code, 0);
  const Outcome parts = train("parts", {"--train.steps", "8", "--resume"}, 2);
  ASSERT_EQ(parts.code, 0) << parts.err;
  EXPECT_EQ(best_of("parts").second, step);
  EXPECT_EQ(kept("parts"), (std::vector<std::string>{"step-" + std::to_string(step)}));
  // One that resumes from an earlier step reaches it again; leftovers of later steps are not mixed with it.
  std::filesystem::remove_all(folder / "again");
  ASSERT_EQ(train("again", {"--train.steps", std::to_string(step)}).code, 0);
  std::filesystem::rename(folder / "again/best/checkpoints/step-" + std::to_string(step), folder / "again/best/checkpoints/step-7");
  std::filesystem::remove_all(folder / "again/checkpoints");
  EXPECT_EQ(train("again", {"--train.steps", std::to_string(step), "--resume"}).code, 0);
  EXPECT_EQ(kept("again"), (std::vector<std::string>{"step-" + std::to_string(step)}));
  // Nor are leftovers of an earlier run mixed with a new one's.
  std::filesystem::remove_all(folder / "run/checkpoints");
  expect_refused(train("run", {}), 64, "run/best/checkpoints holds checkpoints of an earlier run");
}

// A run that was killed before its first checkpoint has nothing but its best weights.
TEST(Train, WorseWeightsDoNotReplaceTheBest) {
  CorpusFolder folder;
  const auto train = [&](const Words& more) {
    return run_sheaf(Words{"train"} + kTinyRun + folder.data("run") +
                     Words{"--output.keep_best", "true", "--train.schedule", "constant", "--train.lr", "0.003", "--train.eval_every", "1",
                           "--train.save_every", "0"} +
                     more);
  };
  testing::expect_ok(train({"--train.steps", "6"}));
  ASSERT_TRUE(std::filesystem::exists(folder / "run/best/checkpoints/step-6"));
  std::filesystem::remove_all(folder / "run/checkpoints");
  const Outcome r = train({"--train.steps", "2", "--resume"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("the run starts from the beginning"));
  EXPECT_TRUE(std::filesystem::exists(folder / "run/best/checkpoints/step-6"));
  EXPECT_THAT(r.out, HasSubstr("  (after step 6; its weights are in "));
  // Nor those of a run with other options, which cannot be compared.
  std::filesystem::remove_all(folder / "run/checkpoints");
  const Words other = {"--train.steps", "2", "--train.lr", "0.002", "--resume"};
  expect_refused(train(other), 76, {"train.lr was 0.003 in the checkpoint and is 0.002 now", "of the best weights so far, in " + (folder / "run/best")});
  expect_refused(train({"--train.steps", "2", "--train.eval_tokens", "40", "--resume"}), 76, "whose losses cannot be compared");
  testing::expect_ok(train(other + Words{"--output.keep_best", "false"}));
  EXPECT_TRUE(std::filesystem::exists(folder / "run/best/checkpoints/step-6"));
}

// By somebody who copied a run without them, or by a disk.
TEST(Train, BestWeightsThatAreGoneOrDamagedAreReplaced) {
  CorpusFolder folder;
  const auto train = [&](const std::string& out, const Words& more) {
    return run_sheaf(on_ranks(2, Words{"train"} + kTinyRun + folder.data(out) +
                                     Words{"--output.keep_best", "true", "--train.schedule", "constant", "--train.lr", "0.3",
                                           "--train.eval_every", "1"} + more));
  };
  testing::expect_ok(train("gone", {"--train.steps", "8"}));
  ASSERT_FALSE(std::filesystem::exists(folder / "gone/best/checkpoints/step-8"));  // it diverges
  std::filesystem::copy(folder / "gone", folder / "damaged", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(folder / "gone/best");
  const std::string best = std::filesystem::directory_iterator(folder / "damaged/best/checkpoints")->path();
  std::filesystem::resize_file(best + "/shard-00001-of-00002.safetensors", 100);
  for (const std::string out : {"gone", "damaged"}) {
    const Outcome r = train(out, {"--train.steps", "9", "--resume"});
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.err, HasSubstr("are not in '" + (folder / out) + "/best': the next evaluation's are the best"));
    EXPECT_THAT(r.out, HasSubstr("  (after step 9; its weights are in " + (folder / out) + "/best)"));
    const auto left = std::filesystem::directory_iterator(folder / out + "/best/checkpoints");
    EXPECT_EQ(std::distance(begin(left), end(left)), 1) << "the broken one is removed";
    testing::expect_ok(run_sheaf({"generate", folder / out + "/best", "--generate.tokens", "3"}));
    // Once they are there nothing is said.
    EXPECT_THAT(train(out, {"--train.steps", "9", "--resume"}).err, ::testing::Not(HasSubstr("the best weights")));
  }
}

TEST(Train, SkippedStepsAreSaid) {
  CorpusFolder folder;
  const Words f16 = Words{"train"} + kTinyRun + Words{"--train.dtype", "f16", "--train.loss_scale", "1099511627776", "--train.steps", "6"};
  Outcome r = run_sheaf(f16 + folder.data("each"));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("note: f16 is for GPUs"));
  EXPECT_THAT(r.out, ::testing::ContainsRegex("step 1/6 .* skipped, loss scale 549755813888\n"));
  EXPECT_THAT(r.out, ::testing::ContainsRegex("step 6/6 .* skipped, loss scale 17179869184\n"));
  const Metrics metrics = folder.metrics("each");
  EXPECT_EQ(metrics.at(3).at("skipped_steps"), "3");
  EXPECT_EQ(metrics.at(3).at("grad_norm"), "null");
  EXPECT_EQ(std::stod(metrics.at(3).at("loss_scale")), 0x1p37);
  EXPECT_EQ(metrics.at(6).at("val_loss"), metrics.at(2).at("val_loss"));  // of the first weights
  r = run_sheaf(f16 + Words{"--train.log_every", "4"} + folder.data("some"));
  EXPECT_THAT(r.out, ::testing::ContainsRegex("step 4/6 .* 4 of 4 skipped, loss scale 68719476736\n"));
  EXPECT_THAT(r.out, ::testing::ContainsRegex("step 6/6 .* 2 of 2 skipped, loss scale 17179869184\n"));
  // Not reported if there is no scale.
  r = run_sheaf(Words{"train"} + kTinyRun + folder.data("f32"));
  EXPECT_THAT(r.out, ::testing::Not(HasSubstr("scale")));
  EXPECT_FALSE(folder.metrics("f32").at(3).contains("loss_scale"));
}

TEST(Train, OmpNumThreadsIsAnUpperBound) {
  CorpusFolder folder;
  const auto train = [&](const Words& command, const Words& environment) {
    std::filesystem::remove_all(folder / "run");
    const Outcome r = run_sheaf(command + kTinyRun + folder.data("run"), environment);
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  const std::string program = on_ranks(2, {"train"})[6];
  const Words launch = {"launch", "--nproc-per-node", "2", "--", program, "train"};
  EXPECT_THAT(train({"train"}, {"OMP_NUM_THREADS=1"}), HasSubstr("1 rank (local) x 1 thread,"));
  EXPECT_THAT(train(launch, {"OMP_NUM_THREADS=1"}), HasSubstr("2 ranks (shm) x 1 thread,"));
  // Sheaf's own settings of threads win.
  const Words both = {"OMP_NUM_THREADS=1", "SHEAF_THREADS_PER_RANK=3"};
  EXPECT_THAT(train({"train"}, both), HasSubstr("x 3 threads,"));
  EXPECT_THAT(train(launch, both), HasSubstr("x 3 threads,"));
  EXPECT_THAT(train({"train", "--threads-per-rank", "2"}, both), HasSubstr("x 2 threads,"));
  const auto threads_on_tape = [&](const Words& environment) {
    return number_after(run_sheaf(Words{"tape"} + kTinyRun + folder.data("none"), environment).out,
                        ", threads ");
  };
  EXPECT_EQ(threads_on_tape({"OMP_NUM_THREADS=1"}), 1);
  EXPECT_EQ(threads_on_tape(both), 3);
}

/// Two ranks, as a launcher for several hosts starts them: each with its own options.
std::vector<Outcome> pair(const Words& first, const Words& second) {
  static int jobs = 0;
  const auto rank = [id = ++jobs](int r) {
    return Words{"PMI_RANK=" + std::to_string(r), "PMI_SIZE=2", "SHEAF_THREADS_PER_RANK=1", "SHEAF_TIMEOUT=20",
                 "PMI_JOBID=" + std::to_string(getpid()) + "." + std::to_string(id)};
  };
  SheafProcess zero(first, rank(0)), one(second, rank(1));
  return {zero.wait(), one.wait()};
}

TEST(Train, RanksWithDifferentOptionsAreRefused) {
  CorpusFolder folder;
  const Words command = Words{"train"} + kTinyRun + folder.data("run");
  const auto expect_refused = [&](const Words& zero, const Words& one, const std::string& part) {
    for (const Outcome& r : pair(command + zero, command + one)) {
      EXPECT_EQ(r.code, 64) << r.err;
      EXPECT_THAT(r.err, HasSubstr(part));
    }
    EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  };
  const std::string disagree = "[config] ranks disagree: ";
  expect_refused({}, {"--train.batch", "7"}, disagree + "train.batch is 5 on rank 0 and 7 on rank 1");
  expect_refused({}, {"--train.lr", "0.002"}, disagree + "train.lr is 0.001 on rank 0 and 0.002 on rank 1");
  expect_refused({"--train.seed", "1"}, {}, disagree + "train.seed is 1 on rank 0 and 1337 on rank 1");
  expect_refused({}, {"--model.layers", "2"}, disagree + "model.layers is 3 on rank 0 and 2 on rank 1");
  expect_refused({}, {"--train.steps", "6"}, disagree + "train.steps is 5 on rank 0 and 6 on rank 1");
  expect_refused({}, {"--output.folder", "elsewhere"}, disagree + "output.folder is " + (folder / "run"));
  expect_refused({"--quiet"}, {}, disagree + "--quiet is true on rank 0 and false on rank 1");
  expect_refused({}, {"--resume"}, disagree + "--resume is false on rank 0 and true on rank 1");
}

TEST(Train, RanksWithDifferentDataAreRefused) {
  CorpusFolder folder;
  std::string text = sample_text(3000);
  text[1500] = text[1500] == 'e' ? 'a' : 'e';  // the same size, the same characters
  std::ofstream(folder / "other.txt") << text;
  const Words command = Words{"train"} + kTinyRun + folder.data("run");
  for (const Outcome& r : pair(command, command + Words{"--data.corpus", folder / "other.txt"})) {
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr("[data] ranks disagree: the data is '" + (folder / "corpus.txt") +
                                 "' (2700 tokens to train on, 300 to validate on, XXH3 "));
    EXPECT_THAT(r.err, HasSubstr(" on rank 0 and '" + (folder / "other.txt") + "' (2700 tokens"));
  }
  // A copy at another path is the same data.
  std::filesystem::copy_file(folder / "corpus.txt", folder / "copy.txt");
  for (const Outcome& r : pair(command, command + Words{"--data.corpus", folder / "copy.txt"}))
    EXPECT_EQ(r.code, 0) << r.err;
}

/// One token per character, 16 bits each, without header.
void write_tokens(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  for (const char c : text) out.put(c).put('\0');
}

TEST(Train, ManyTokenFilesAreOneOfAllTokens) {
  CorpusFolder folder;
  std::string text = sample_text(3000);
  const auto write_parts = [&] {
    for (size_t i = 0; i < 50; ++i)
      write_tokens(folder / ("part_" + std::to_string(100 + i) + ".bin"), text.substr(60 * i, 60));
  };
  write_tokens(folder / "all.bin", text);
  write_tokens(folder / "val_1.bin", text.substr(0, 333));
  write_parts();
  const auto train = [&](const std::string& file, const std::string& out) {
    return Words{"train"} + kTinyRun + Words{"--model.vocab", "128", "--data.train_file", folder / file,
                                          "--data.val_file", folder / "val_?.bin", "--output.folder", folder / out};
  };
  for (int world : {1, 2}) {
    for (const char* out : {"one", "many"}) std::filesystem::remove_all(folder / out);
    ASSERT_EQ(run_sheaf(on_ranks(world, train("all.bin", "one"))).code, 0);
    const Outcome r = run_sheaf(on_ranks(world, train("part_*.bin", "many")));
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("parameters, 3000 training tokens in 50 files, 0.13 epochs\n"));
    expect_same_curve(folder.metrics("many"), folder.metrics("one"), "ranks: " + std::to_string(world));
  }
  // Each run can be resumed with the other's files.
  EXPECT_EQ(run_sheaf(train("part_*.bin", "one") + Words{"--resume"}).code, 0);
  EXPECT_EQ(run_sheaf(train("all.bin", "many") + Words{"--resume"}).code, 0);
  // All files count, in any folder.
  text[1500] = text[1500] == 'e' ? 'a' : 'e';
  write_parts();
  for (int world : {1, 2}) {
    const Outcome r = run_sheaf(on_ranks(world, train("part_*.bin", "many") + Words{"--resume"}));
    EXPECT_EQ(r.code, 76) << r.err;
    EXPECT_THAT(r.err, HasSubstr("the training data was 3000 tokens with XXH3 "));
  }
  for (const Outcome& r : pair(train("all.bin", "new"), train("part_*.bin", "new"))) {
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr(" on rank 0 and '" + (folder / "part_*.bin") + "' (3000 tokens to train on"));
  }
}

// Each set with its own loss, and all together.
TEST(Train, ValidatesOnSeveralSets) {
  CorpusFolder folder;
  const std::string text = sample_text(3000);
  write_tokens(folder / "a.bin", text.substr(0, 2000));
  write_tokens(folder / "b.bin", text.substr(2000));
  const auto train = [&](const std::string& sets, const std::string& out) {
    return Words{"train"} + kTinyRun + Words{"--model.vocab", "128", "--data.train_file", folder / "a.bin", "--data.val_file", sets,
                                             "--train.eval_tokens", "0", "--output.folder", folder / out};
  };
  const std::string both = "long=" + (folder / "a.bin") + " short=" + (folder / "b.bin");
  const Outcome one = run_sheaf(train(both, "one")), two = run_sheaf(on_ranks(2, train(both, "two")));
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(two.code, 0) << two.err;
  const auto last = [&](const char* out) { return folder.metrics(out).rbegin()->second; };
  const auto of = [&](const char* out, const char* field) { return std::stod(last(out).at(field)); };
  const double a = of("one", "val_loss_long"), b = of("one", "val_loss_short");
  EXPECT_NE(a, b);
  EXPECT_NEAR(of("one", "val_loss"), (1999 * a + 999 * b) / 2998, 1e-9);
  EXPECT_NEAR(of("two", "val_loss_short"), b, 1e-5);
  EXPECT_THAT(one.out, HasSubstr(", of long " + last("one").at("val_loss_long").substr(0, 6)));
  // A single set has the loss that it has among others, and no name.
  ASSERT_EQ(run_sheaf(train(folder / "b.bin", "alone")).code, 0);
  EXPECT_EQ(last("alone").at("val_loss"), last("one").at("val_loss_short"));
  EXPECT_FALSE(last("alone").contains("val_loss_short"));
  EXPECT_EQ(run_sheaf(train(both, "one") + Words{"--resume"}).code, 0);
  expect_refused(run_sheaf(train("long=" + (folder / "a.bin") + " short=" + (folder / "a.bin"), "one") + Words{"--resume"}), 76,
                 "the validation data was 3000 tokens with XXH3 ");
  expect_refused(run_sheaf(train(both + " long=" + (folder / "a.bin"), "new")), 64, "two validation sets have the name 'long'");
}

// 2,700 tokens are 167 windows of 16, so 2 epochs are 67 steps of 5 windows, and half of one 17.
TEST(Train, EpochsSayHowManyStepsThereAre) {
  CorpusFolder folder;
  Words tiny = kTinyRun;
  const auto steps = std::ranges::find(tiny, "--train.steps");
  tiny.erase(steps, steps + 2);
  const auto train = [&](const char* epochs, const std::string& out) {
    return Words{"train"} + tiny + folder.data(out) + Words{"--train.epochs", epochs, "--train.eval_every", "0", "--train.log_every", "10"};
  };
  const Outcome two = run_sheaf(train("2", "two"));
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(two.out, HasSubstr("2700 training tokens, 2.0 epochs\n"));
  EXPECT_EQ(folder.metrics("two").rbegin()->first, 67);
  ASSERT_EQ(run_sheaf(train("0.5", "half")).code, 0);
  EXPECT_EQ(folder.metrics("half").rbegin()->first, 17);
  EXPECT_LT(std::stod(folder.metrics("two").rbegin()->second.at("lr")), 1.1e-4) << "the schedule ends with them";
  const Outcome again = run_sheaf({"train", "--output.folder", folder / "two", "--resume", "--generate.tokens", "2"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out,
              HasSubstr("the run is complete at step 67: nothing is left to train, as train.epochs 2 are 67 steps; to go on, give a larger "
                        "--train.epochs and --train.decay_end 67, after which"));
  expect_refused(run_sheaf(train("3", "two") + Words{"--resume"}), 76, "train.decay_end, by default train.steps, was 67");
  expect_refused(run_sheaf(train("3", "new") + Words{"--train.steps", "7"}), 64, "train.epochs says how many steps there are");
  expect_refused(run_sheaf(train("1", "new") + Words{"--train.decay_start", "40"}), 64,
                 "train.epochs 1 are 34 steps: the decay would start at step 40 and end at step 34");
  write_tokens(folder / "a.bin", sample_text(100));
  write_tokens(folder / "b.bin", sample_text(90));
  expect_refused(run_sheaf(Words{"train"} + tiny + Words{"--model.vocab", "128", "--data.train_file", "1 " + (folder / "a.bin") + " 1 " +
                           (folder / "b.bin"), "--data.val_file", folder / "a.bin", "--output.folder", folder / "new", "--train.epochs", "1"}),
                 64, "sources of a mixture have epochs of their own");
}

// By weights; the same samples for any number of ranks.
TEST(Train, MixesDataSets) {
  CorpusFolder folder;
  const std::string text = sample_text(3000);
  write_tokens(folder / "all.bin", text);
  write_tokens(folder / "a.bin", text.substr(0, 2000));
  write_tokens(folder / "b.bin", text.substr(2000));
  const auto train = [&](const std::string& weights, const std::string& out) {
    return Words{"train"} + kTinyRun + Words{"--model.vocab", "128", "--data.train_file",
                                             "3 " + (folder / "a.bin") + " " + weights + " " + (folder / "b.bin"), "--data.val_file",
                                             folder / "all.bin", "--output.folder", folder / out};
  };
  const Words parts = {"--train.micro_batches", "2"};
  const Outcome one = run_sheaf(on_ranks(1, train("1", "one") + parts)), two = run_sheaf(on_ranks(2, train("1", "two")));
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(two.code, 0) << two.err;
  for (const Outcome& r : {one, two})
    EXPECT_THAT(r.out, HasSubstr("3000 training tokens in 2 files\n  75 % of the samples from '" + (folder / "a.bin") +
                                 "': 2000 training tokens, 0.15 epochs\n  25 % of the samples from '" + (folder / "b.bin") +
                                 "': 1000 training tokens, 0.10 epochs\n"));
  expect_same_curve(folder.metrics("two"), folder.metrics("one"), "two ranks");
  EXPECT_EQ(run_sheaf(train("1", "one") + Words{"--resume"}).code, 0);
  const Outcome other = run_sheaf(train("2", "one") + Words{"--resume"});  // another weight
  EXPECT_EQ(other.code, 76);
  EXPECT_THAT(other.err, HasSubstr("the training data was 3000 tokens with XXH3 "));
  const Outcome odd = run_sheaf(train("x", "new"));
  EXPECT_EQ(odd.code, 64);
  EXPECT_THAT(odd.err, HasSubstr("found 'x' where a weight should be"));
}

TEST(Train, ARankWithWrongOptionsEndsTheOthersWait) {
  CorpusFolder folder;
  const Words command = Words{"train"} + kTinyRun + folder.data("run");
  const auto of_options = pair(command, command + Words{"--train.stepz", "3"});
  EXPECT_EQ(of_options[1].code, 64) << of_options[1].err;
  const auto of_data = pair(command, command + Words{"--data.corpus", folder / "missing.txt"});
  EXPECT_EQ(of_data[1].code, 65) << of_data[1].err;
  for (const auto& [outcome, part] : {std::pair{of_options[0], "rank 1 failed: [config]"},
                                      {of_data[0], "rank 1 failed: [file] cannot open"}}) {
    EXPECT_EQ(outcome.code, 72) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(part));
  }
}

void wait_for_steps(SheafProcess& job, const CorpusFolder& folder, const std::string& out, size_t steps) {
  while (job.running() && (!std::filesystem::exists(folder / out + "/metrics.jsonl") ||
                           folder.metrics(out).size() < steps))
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

TEST(Train, OneRunAtATimeWritesToAFolder) {
  CorpusFolder folder;
  const Words endless = {"--train.steps", "1000000", "--train.save_every", "0", "--train.eval_every", "0"};
  SheafProcess job(on_ranks(1, Words{"train"} + kTinyRun + folder.data("run") + endless));
  wait_for_steps(job, folder, "run", 1);
  for (int world : {1, 2}) {
    const Outcome r = run_sheaf(on_ranks(world, Words{"train"} + kTinyRun + folder.data("run")));
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr("[train] another run is writing to '" + (folder / "run") + "'"));
  }
  EXPECT_TRUE(job.running());
  job.signal_all(SIGKILL);
  job.wait();
  const Outcome r = run_sheaf(Words{"train"} + kTinyRun + folder.data("run"));
  EXPECT_EQ(r.code, 0) << r.err;
}

TEST(Train, StoppedRankEndsTheJobInATimeOut) {
  CorpusFolder folder;
  SheafProcess job(on_ranks(3, Words{"train"} + kTinyRun + folder.data("run") +
                                            Words{"--train.steps", "1000000", "--train.eval_every",
                                                  "0", "--train.save_every", "0"}),
                   {"SHEAF_TIMEOUT=8"});
  wait_for_steps(job, folder, "run", 5);
  ASSERT_EQ(job.ranks().size(), 3u);
  kill(job.ranks()[2], SIGSTOP);
  const Outcome r = job.wait();
  EXPECT_EQ(r.code, 71);
  const std::string line = lines_of(r.err).back();
  EXPECT_TRUE(line.starts_with("sheaf launch: rank ")) << line;
  for (const char* part : {"exited with code 71: [", "] rank ",
                           " of 3: time-out after 8.0 s at sequence ", "missing ranks: 2"})
    EXPECT_THAT(line, HasSubstr(part));
  EXPECT_THAT(line, ::testing::ContainsRegex(
                        "sequence [0-9]+ \\([a-z][a-z_.0-9]*\\)"));  // the purpose of the call
}

}  // namespace
}  // namespace sheaf::testing
