// What a run reports and costs: metrics, peak memory against the tape's forecast, and what a
// hanging rank leads to.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using testing::expect_same_curve;
using ::testing::HasSubstr;
using testing::Metrics;
using testing::Outcome;
using testing::run_sheaf;
using testing::SheafProcess;

using testing::operator+;
using testing::Words;

struct Folder : ScratchFolder {
  Folder() { std::ofstream(*this / "corpus.txt") << testing::sample_text(3000); }
  Words data(const std::string& out) const {
    return {"--data.corpus", *this / "corpus.txt", "--output.folder",
            *this / out,     "--generate.tokens",  "2"};
  }
  Metrics metrics(const std::string& out) const {
    return testing::read_metrics(*this / out + "/metrics.jsonl");
  }
};

/// "… <before> 123 …" → 123, of the first place from `from` on.
int64_t number_after(const std::string& text, const std::string& before, size_t from = 0) {
  const size_t at = text.find(before, from);
  if (at == std::string::npos) {
    ADD_FAILURE() << "no '" << before << "' in " << text;
    return -1;
  }
  return std::stoll(text.substr(at + before.size()));
}

int64_t forecast(const Words& model, int world, int rank, int threads,
                 const Words& environment = {}) {
  const Outcome r =
      run_sheaf(Words{"tape", "--world", std::to_string(world), "--rank", std::to_string(rank),
                      "--threads-per-rank", std::to_string(threads)} +
                    model,
                environment);
  EXPECT_EQ(r.code, 0) << r.err;
  return number_after(r.out, ": peak ");
}

/// Trains, and compares the peak of every step from the second on with what `sheaf tape` printed
/// beforehand.
void expect_forecast(const Folder& folder, const Words& model, int world, int threads,
                     const Words& environment = {}) {
  std::vector<int64_t> predicted;
  for (int r = 0; r < world; ++r)
    predicted.push_back(forecast(model + folder.data("none"), world, r, threads, environment));
  std::filesystem::remove_all(folder / "run");
  Words command = Words{"train"} + model + folder.data("run");
  command = world == 1 ? command + Words{"--threads-per-rank", std::to_string(threads)}
                       : testing::on_ranks(world, command);
  if (world > 1) command[4] = std::to_string(threads);
  const Outcome r = run_sheaf(command, environment);
  ASSERT_EQ(r.code, 0) << r.err;
  const std::string largest = std::to_string(*std::max_element(predicted.begin(), predicted.end()));
  for (const auto& [step, fields] : folder.metrics("run")) {
    if (step >= 2) {
      EXPECT_EQ(fields.at("peak_bytes"), largest) << "step " << step;
    }
  }
  for (int rank = 0; rank < world; ++rank) {
    const size_t line = r.out.find("  rank " + std::to_string(rank) + "  measured ");
    ASSERT_NE(line, std::string::npos) << r.out;
    EXPECT_EQ(number_after(r.out, "measured ", line), predicted[rank]) << "rank " << rank;
  }
}

const Words kTiny = {"--model.layers",      "3",   "--model.heads",      "2",
                     "--model.width",       "16",  "--model.context",    "16",
                     "--train.steps",       "5",   "--train.batch",      "5",
                     "--train.warmup",      "0",   "--train.eval_every", "2",
                     "--train.eval_tokens", "150", "--train.save_every", "2"};

TEST(PeakMemory, IsWhatTheTapeSays) {
  Folder folder;
  int i = 0;
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    for (int world : {1, 2, 3}) {
      for (const char* type : {"gpt2", "llama"}) {
        // Accumulation, dropout and threads come and go in another rhythm than the rest.
        ++i;
        Words model = kTiny + Words{"--sharding.strategy",   strategy,
                                    "--model.type",          type,
                                    "--train.micro_batches", i % 3 == 0 ? "2" : "1",
                                    "--model.dropout",       i % 5 < 2 ? "0.1" : "0",
                                    "--train.dtype",         i % 7 < 2 ? "bf16" : i % 7 == 2 ? "f16" : "f32"};
        if (type == std::string("gpt2"))
          model = model + Words{"--model.bias", i % 4 == 1 ? "true" : "false"};
        SCOPED_TRACE(::testing::PrintToString(model) + " on " + std::to_string(world));
        expect_forecast(folder, model, world, 1 + i % 2);
      }
    }
  }
}

TEST(PeakMemory, WithOtherUnitsAndBudgets) {
  Folder folder;
  for (const Words& more :
       {Words{"--sharding.units", "none"},
        Words{"--sharding.units", "count", "--sharding.min_parameters", "700"},
        Words{"--sharding.prefetch_bytes", "0"}, Words{"--sharding.prefetch_bytes", "1000000"},
        Words{"--model.tie_embeddings", "false", "--model.vocab", "100"},
        Words{"--train.batch", "1"}, Words{"--train.recompute", "block"},
        Words{"--data.separate_documents", "true", "--data.end_of_text", "1", "--train.recompute", "selective"},
        Words{"--train.recompute", "block", "--train.micro_batches", "2", "--model.dropout", "0.1",
              "--model.type", "llama", "--sharding.strategy", "shard_grad_op"}}) {
    SCOPED_TRACE(::testing::PrintToString(more));
    expect_forecast(folder, kTiny + more, 2, 1);
  }
}

TEST(PeakMemory, IsLessWhereBlocksAreComputedAgain) {
  Folder folder;
  const Words model =
      kTiny + Words{"--model.layers", "8", "--train.dtype", "bf16", "--train.batch", "60"};
  EXPECT_LT(2 * forecast(model + Words{"--train.recompute", "block"} + folder.data("none"), 1, 0, 1),
            forecast(model + folder.data("none"), 1, 0, 1));
  for (int world : {1, 2}) {
    for (const char* recompute : {"none", "block"}) {
      const Outcome r = run_sheaf(testing::on_ranks(
          world, Words{"train"} + model + folder.data(recompute) +
                     Words{"--train.recompute", recompute, "--model.dropout", "0.1"}));
      ASSERT_EQ(r.code, 0) << r.err;
    }
    expect_same_curve(folder.metrics("block"), folder.metrics("none"), "computed again");
    for (const char* out : {"none", "block"}) std::filesystem::remove_all(folder / out);
  }
}

TEST(PeakMemory, OverGloo) {
  Folder folder;
  for (int world : {2, 3}) expect_forecast(folder, kTiny, world, 1, {"SHEAF_COMM=gloo"});
}

TEST(PeakMemory, OfGroupsOfRanks) {
  Folder folder;
  const Words groups = kTiny + Words{"--sharding.replicas", "2"};
  expect_forecast(folder, groups, 4, 1);
  expect_forecast(folder, groups + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 4, 1,
                  {"SHEAF_COMM=gloo"});
  expect_forecast(folder, groups + Words{"--sharding.strategy", "shard_grad_op"}, 2, 1);
  expect_forecast(folder, groups + Words{"--sharding.secondary", "true", "--train.dtype", "bf16", "--train.micro_batches", "2"}, 4, 1);
  const Words layers = kTiny + Words{"--sharding.tensor", "2"};
  expect_forecast(folder, layers, 4, 1);
  expect_forecast(folder, layers + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 2, 1,
                  {"SHEAF_COMM=gloo"});
  const Words sequences = kTiny + Words{"--sharding.context", "2"};
  expect_forecast(folder, sequences, 4, 1);
  expect_forecast(folder, sequences + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 2, 1);
  expect_forecast(folder, sequences + Words{"--model.heads", "4", "--sharding.tensor", "2", "--train.recompute", "block"}, 4, 1, {"SHEAF_COMM=gloo"});
}

// Replicas of the model, and groups of ranks that share sequences or layers.
TEST(Groups, HaveTheSameBitsOverEveryTransport) {
  for (const auto& [option, said] : {std::pair<std::string, std::string>{"--sharding.replicas", " in 2 replicas, "},
                                     {"--sharding.context", " over groups of 2 that share sequences, "},
                                     {"--sharding.tensor", " over groups of 2 that share layers, "}}) {
    Folder folder;
    const Words command = Words{"train"} + kTiny + Words{option, "2"};
    for (const char* comm : {"shm", "gloo"}) {
      const Outcome r = run_sheaf(testing::on_ranks(4, command + folder.data(comm)), {std::string("SHEAF_COMM=") + comm});
      ASSERT_EQ(r.code, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr(std::string("4 ranks (") + comm + ") x 1 thread, full_shard" + said));
    }
    expect_same_curve(folder.metrics("gloo"), folder.metrics("shm"), option + " over Gloo");
    // A group on each of two hosts: shared memory within them.
    Words hosts = testing::on_ranks(4, command + folder.data("hosts"));
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

// The first step prefetches nothing; a run that is complete takes none.
TEST(PeakMemory, IsComparedWithTheSameKindOfStep) {
  Folder folder;
  const auto peaks_of = [&](const Words& more) {
    const Outcome r = run_sheaf(testing::on_ranks(2, Words{"train"} + kTiny + folder.data("run") + more));
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.out, ::testing::Not(HasSubstr("DIFFERENT")));
    EXPECT_THAT(r.out, HasSubstr("validation loss"));
    const size_t at = r.out.find("peak memory of");
    return at == std::string::npos ? "" : r.out.substr(at, r.out.find("\n\n", at) - at);
  };
  EXPECT_THAT(peaks_of({"--train.steps", "1"}),
              ::testing::AllOf(HasSubstr("the first step"), HasSubstr("tape for later steps ")));
  std::filesystem::remove_all(folder / "run");
  EXPECT_EQ(peaks_of({"--train.steps", "0"}), "");
  std::filesystem::remove_all(folder / "run");
  EXPECT_THAT(peaks_of({}), HasSubstr("(equal)"));
  const Metrics metrics = folder.metrics("run");
  EXPECT_EQ(metrics.at(5).at("tokens"), "400");  // 5 steps of 5 sequences of 16
  EXPECT_GE(std::stod(metrics.at(5).at("seconds")), std::stod(metrics.at(4).at("seconds")));
  EXPECT_EQ(peaks_of({"--resume"}), "");
}

/// Bytes that rank `rank` holds now. The system counts to it also the pages of its peers' wire
/// memory that it has read: they are its peers', who are asked for them, and are left out.
int64_t resident(pid_t pid, int rank) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/smaps");
  const std::string shared = "/memfd:sheaf-rank-", own = shared + std::to_string(rank) + " ";
  int64_t bytes = 0;
  bool counts = true;
  for (std::string line; std::getline(maps, line);) {
    if (const size_t dash = line.find('-'); dash != std::string::npos && dash < line.find(' '))
      counts = line.find(shared) == std::string::npos || line.find(own) != std::string::npos;
    else if (counts && line.starts_with("Rss:"))
      bytes += std::stoll(line.substr(4)) * 1024;
  }
  return bytes;
}

// Beside what the allocator is asked for there are code, stacks, libraries' own memory and free
// blocks it keeps.
TEST(PeakMemory, OfTheProcess) {
#if defined(SHEAF_ASAN) || defined(SHEAF_TSAN)
  GTEST_SKIP() << "a sanitizer's own memory would be counted";
#endif
  Folder folder;
  // 6.3 million parameters: 101 MB with gradients and AdamW's state.
  const Words model = {"--model.layers",      "8",   "--model.heads",      "4",
                       "--model.width",       "256", "--model.context",    "64",
                       "--train.steps",       "4",   "--train.batch",      "8",
                       "--train.warmup",      "0",   "--train.eval_every", "2",
                       "--train.eval_tokens", "500", "--train.save_every", "2"};
  const int64_t empty = run_sheaf({"--help"}).resident_peak;
  for (int world : {1, 2}) {
    const int64_t predicted = forecast(model + folder.data("none"), world, 0, 1);
    EXPECT_GT(predicted, world == 1 ? 100'000'000 : 50'000'000);
    SheafProcess job(testing::on_ranks(
        world, Words{"train"} + model + folder.data("run-" + std::to_string(world))));
    int64_t peak = 0;
    while (job.running()) {
      const std::vector<pid_t> ranks = world == 1 ? std::vector<pid_t>{job.pid()} : job.ranks();
      for (size_t r = 0; r < ranks.size(); ++r)
        peak = std::max(peak, resident(ranks[r], static_cast<int>(r)));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const Outcome r = job.wait();
    ASSERT_EQ(r.code, 0) << r.err;
    if (world == 1) peak = r.resident_peak;
    std::printf("world %d: resident peak %.1f MB, of an empty program %.1f MB, forecast %.1f MB\n",
                world, 1e-6 * peak, 1e-6 * empty, 1e-6 * predicted);
    EXPECT_LE(static_cast<double>(peak - empty), 1.1 * static_cast<double>(predicted) + 64e6);
  }
}

TEST(Train, TwoRanksAreOneRankWithTwoMicroBatches) {
  Folder folder;
  for (const char* batch : {"6", "5"}) {
    for (const char* dropout : {"0", "0.1"}) {
      const Words model =
          kTiny + Words{"--train.steps", "20", "--train.batch", batch, "--model.dropout", dropout};
      for (const char* out : {"one", "two"}) std::filesystem::remove_all(folder / out);
      Outcome r = run_sheaf(testing::on_ranks(
          1, Words{"train"} + model + folder.data("one") + Words{"--train.micro_batches", "2"}));
      ASSERT_EQ(r.code, 0) << r.err;
      for (const char* comm : {"shm", "gloo"}) {
        std::filesystem::remove_all(folder / "two");
        r = run_sheaf(testing::on_ranks(2, Words{"train"} + model + folder.data("two")),
                      {std::string("SHEAF_COMM=") + comm});
        ASSERT_EQ(r.code, 0) << r.err;
        EXPECT_THAT(r.out, HasSubstr(std::string("sheaf train: 2 ranks (") + comm + ")"));
        expect_same_curve(folder.metrics("two"), folder.metrics("one"),
                          std::string(comm) + ", batch " + batch + ", dropout " + dropout);
      }
    }
  }
}

TEST(Train, SkippedStepsAreSaid) {
  Folder folder;
  const Words f16 = Words{"train"} + kTiny + Words{"--train.dtype", "f16", "--train.loss_scale", "1099511627776", "--train.steps", "6"};
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
  // Nothing of it where there is no scale.
  r = run_sheaf(Words{"train"} + kTiny + folder.data("f32"));
  EXPECT_THAT(r.out, ::testing::Not(HasSubstr("scale")));
  EXPECT_FALSE(folder.metrics("f32").at(3).contains("loss_scale"));
}

TEST(Train, OmpNumThreadsIsAnUpperBound) {
  Folder folder;
  const auto train = [&](const Words& command, const Words& environment) {
    std::filesystem::remove_all(folder / "run");
    const Outcome r = run_sheaf(command + kTiny + folder.data("run"), environment);
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  const std::string program = testing::on_ranks(2, {"train"})[6];
  const Words launch = {"launch", "--nproc-per-node", "2", "--", program, "train"};
  EXPECT_THAT(train({"train"}, {"OMP_NUM_THREADS=1"}), HasSubstr("1 rank (local) x 1 thread,"));
  EXPECT_THAT(train(launch, {"OMP_NUM_THREADS=1"}), HasSubstr("2 ranks (shm) x 1 thread,"));
  // What asks for Sheaf's own threads wins.
  const Words both = {"OMP_NUM_THREADS=1", "SHEAF_THREADS_PER_RANK=3"};
  EXPECT_THAT(train({"train"}, both), HasSubstr("x 3 threads,"));
  EXPECT_THAT(train(launch, both), HasSubstr("x 3 threads,"));
  EXPECT_THAT(train({"train", "--threads-per-rank", "2"}, both), HasSubstr("x 2 threads,"));
  const auto threads_on_tape = [&](const Words& environment) {
    return number_after(run_sheaf(Words{"tape"} + kTiny + folder.data("none"), environment).out,
                        ", threads ");
  };
  EXPECT_EQ(threads_on_tape({"OMP_NUM_THREADS=1"}), 1);
  EXPECT_EQ(threads_on_tape(both), 3);
}

/// Two ranks, as a launcher for several hosts starts them: each with options of its own.
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
  Folder folder;
  const Words command = Words{"train"} + kTiny + folder.data("run");
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
  Folder folder;
  std::string text = testing::sample_text(3000);
  text[1500] = text[1500] == 'e' ? 'a' : 'e';  // the same size, the same characters
  std::ofstream(folder / "other.txt") << text;
  const Words command = Words{"train"} + kTiny + folder.data("run");
  for (const Outcome& r : pair(command, command + Words{"--data.corpus", folder / "other.txt"})) {
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr("[data] ranks disagree: the data is '" + (folder / "corpus.txt") +
                                 "' (2700 tokens to train on, 300 to validate on, XXH3 "));
    EXPECT_THAT(r.err, HasSubstr(" on rank 0 and '" + (folder / "other.txt") + "' (2700 tokens"));
  }
  // A copy at another place is the same data.
  std::filesystem::copy_file(folder / "corpus.txt", folder / "copy.txt");
  for (const Outcome& r : pair(command, command + Words{"--data.corpus", folder / "copy.txt"}))
    EXPECT_EQ(r.code, 0) << r.err;
}

/// A character a token, 16 bits each, without header.
void write_tokens(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  for (const char c : text) out.put(c).put('\0');
}

TEST(Train, ManyTokenFilesAreOneOfAllTokens) {
  Folder folder;
  std::string text = testing::sample_text(3000);
  const auto write_parts = [&] {
    for (size_t i = 0; i < 50; ++i)
      write_tokens(folder / ("part_" + std::to_string(100 + i) + ".bin"), text.substr(60 * i, 60));
  };
  write_tokens(folder / "all.bin", text);
  write_tokens(folder / "val_1.bin", text.substr(0, 333));
  write_parts();
  const auto train = [&](const std::string& file, const std::string& out) {
    return Words{"train"} + kTiny + Words{"--model.vocab", "128", "--data.train_file", folder / file,
                                          "--data.val_file", folder / "val_?.bin", "--output.folder", folder / out};
  };
  for (int world : {1, 2}) {
    for (const char* out : {"one", "many"}) std::filesystem::remove_all(folder / out);
    ASSERT_EQ(run_sheaf(testing::on_ranks(world, train("all.bin", "one"))).code, 0);
    const Outcome r = run_sheaf(testing::on_ranks(world, train("part_*.bin", "many")));
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("parameters, 3000 training tokens in 50 files\n"));
    expect_same_curve(folder.metrics("many"), folder.metrics("one"), "ranks: " + std::to_string(world));
  }
  // Neither run minds going on with the other's files.
  EXPECT_EQ(run_sheaf(train("part_*.bin", "one") + Words{"--resume"}).code, 0);
  EXPECT_EQ(run_sheaf(train("all.bin", "many") + Words{"--resume"}).code, 0);
  // All files count, wherever they are.
  text[1500] = text[1500] == 'e' ? 'a' : 'e';
  write_parts();
  for (int world : {1, 2}) {
    const Outcome r = run_sheaf(testing::on_ranks(world, train("part_*.bin", "many") + Words{"--resume"}));
    EXPECT_EQ(r.code, 76) << r.err;
    EXPECT_THAT(r.err, HasSubstr("the training data was 3000 tokens with XXH3 "));
  }
  for (const Outcome& r : pair(train("all.bin", "new"), train("part_*.bin", "new"))) {
    EXPECT_EQ(r.code, 64) << r.err;
    EXPECT_THAT(r.err, HasSubstr(" on rank 0 and '" + (folder / "part_*.bin") + "' (3000 tokens to train on"));
  }
}

TEST(Train, ARankWithWrongOptionsEndsTheOthersWait) {
  Folder folder;
  const Words command = Words{"train"} + kTiny + folder.data("run");
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

void wait_for_steps(SheafProcess& job, const Folder& folder, const std::string& out, size_t steps) {
  while (job.running() && (!std::filesystem::exists(folder / out + "/metrics.jsonl") ||
                           folder.metrics(out).size() < steps))
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

TEST(Train, OneRunAtATimeWritesToAFolder) {
  Folder folder;
  const Words endless = {"--train.steps", "1000000", "--train.save_every", "0", "--train.eval_every", "0"};
  SheafProcess job(testing::on_ranks(1, Words{"train"} + kTiny + folder.data("run") + endless));
  wait_for_steps(job, folder, "run", 1);
  for (int world : {1, 2})
    for (const Words& more : {Words{}, Words{"--resume"}}) {
      const Outcome r =
          run_sheaf(testing::on_ranks(world, Words{"train"} + kTiny + folder.data("run") + more));
      EXPECT_EQ(r.code, 64) << r.err;
      EXPECT_THAT(r.err, HasSubstr("[train] another run is writing to '" + (folder / "run") + "'"));
    }
  EXPECT_TRUE(job.running());
  job.signal_all(SIGKILL);
  job.wait();
  const Outcome r = run_sheaf(Words{"train"} + kTiny + folder.data("run"));
  EXPECT_EQ(r.code, 0) << r.err;
}

TEST(Train, StoppedRankEndsTheJobInATimeOut) {
  Folder folder;
  SheafProcess job(testing::on_ranks(3, Words{"train"} + kTiny + folder.data("run") +
                                            Words{"--train.steps", "1000000", "--train.eval_every",
                                                  "0", "--train.save_every", "0"}),
                   {"SHEAF_TIMEOUT=8"});
  wait_for_steps(job, folder, "run", 5);
  ASSERT_EQ(job.ranks().size(), 3u);
  kill(job.ranks()[2], SIGSTOP);
  const Outcome r = job.wait();
  EXPECT_EQ(r.code, 71);
  const std::string line = testing::lines_of(r.err).back();
  EXPECT_TRUE(line.starts_with("sheaf launch: rank ")) << line;
  for (const char* part : {"exited with code 71: [", "] rank ",
                           " of 3: time-out after 8.0 s at sequence ", "missing ranks: 2"})
    EXPECT_THAT(line, HasSubstr(part));
  EXPECT_THAT(line, ::testing::ContainsRegex(
                        "sequence [0-9]+ \\([a-z][a-z_.0-9]*\\)"));  // what the call was for
}

}  // namespace
}  // namespace sheaf
