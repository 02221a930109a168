// The peak of a step's memory equals the tape's prediction, and the process needs little more.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

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

/// Trains, and compares the peak of every step from the second on with the earlier prediction of `sheaf tape`.
void expect_forecast(const CorpusFolder& folder, const Words& model, int world, int threads,
                     const Words& environment = {}) {
  std::vector<int64_t> predicted;
  for (int r = 0; r < world; ++r)
    predicted.push_back(forecast(model + folder.data("none"), world, r, threads, environment));
  std::filesystem::remove_all(folder / "run");
  Words command = Words{"train"} + model + folder.data("run");
  command = world == 1 ? command + Words{"--threads-per-rank", std::to_string(threads)}
                       : on_ranks(world, command);
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

TEST(PeakMemory, IsWhatTheTapeSays) {
  CorpusFolder folder;
  int i = 0;
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    for (int world : {1, 2, 3}) {
      for (const char* type : {"gpt2", "llama"}) {
        // Accumulation, dropout and threads alternate with other periods than the rest.
        ++i;
        Words model = kTinyRun + Words{"--sharding.strategy",   strategy,
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
  CorpusFolder folder;
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
    expect_forecast(folder, kTinyRun + more, 2, 1);
  }
}

TEST(PeakMemory, IsLessWhereBlocksAreComputedAgain) {
  CorpusFolder folder;
  const Words model =
      kTinyRun + Words{"--model.layers", "8", "--train.dtype", "bf16", "--train.batch", "60"};
  EXPECT_LT(2 * forecast(model + Words{"--train.recompute", "block"} + folder.data("none"), 1, 0, 1),
            forecast(model + folder.data("none"), 1, 0, 1));
  for (int world : {1, 2}) {
    for (const char* recompute : {"none", "block"}) {
      const Outcome r = run_sheaf(on_ranks(
          world, Words{"train"} + model + folder.data(recompute) +
                     Words{"--train.recompute", recompute, "--model.dropout", "0.1"}));
      ASSERT_EQ(r.code, 0) << r.err;
    }
    expect_same_curve(folder.metrics("block"), folder.metrics("none"), "computed again");
    for (const char* out : {"none", "block"}) std::filesystem::remove_all(folder / out);
  }
}

TEST(PeakMemory, OverGloo) {
  CorpusFolder folder;
  for (int world : {2, 3}) expect_forecast(folder, kTinyRun, world, 1, {"SHEAF_COMM=gloo"});
}

TEST(PeakMemory, OfGroupsOfRanks) {
  CorpusFolder folder;
  const Words groups = kTinyRun + Words{"--sharding.replicas", "2"};
  expect_forecast(folder, groups, 4, 1);
  expect_forecast(folder, groups + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 4, 1,
                  {"SHEAF_COMM=gloo"});
  expect_forecast(folder, groups + Words{"--sharding.strategy", "shard_grad_op"}, 2, 1);
  expect_forecast(folder, groups + Words{"--sharding.secondary", "true", "--train.dtype", "bf16", "--train.micro_batches", "2"}, 4, 1);
  const Words layers = kTinyRun + Words{"--sharding.tensor", "2"};
  expect_forecast(folder, layers, 4, 1);
  expect_forecast(folder, layers + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 2, 1,
                  {"SHEAF_COMM=gloo"});
  const Words sequences = kTinyRun + Words{"--sharding.context", "2"};
  expect_forecast(folder, sequences, 4, 1);
  expect_forecast(folder, sequences + Words{"--train.dtype", "bf16", "--train.micro_batches", "2"}, 2, 1);
  expect_forecast(folder, sequences + Words{"--model.heads", "4", "--sharding.tensor", "2", "--train.recompute", "block"}, 4, 1, {"SHEAF_COMM=gloo"});
}

// The first step prefetches nothing; a completed run has no steps.
TEST(PeakMemory, IsComparedWithTheSameKindOfStep) {
  CorpusFolder folder;
  const auto peaks_of = [&](const Words& more) {
    const Outcome r = run_sheaf(on_ranks(2, Words{"train"} + kTinyRun + folder.data("run") + more));
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
  EXPECT_THAT(peaks_of({}), ::testing::AllOf(HasSubstr("(equal)"), HasSubstr("\n  held for "), HasSubstr("activations ")));
  const Metrics metrics = folder.metrics("run");
  EXPECT_EQ(metrics.at(5).at("tokens"), "400");  // 5 steps of 5 sequences of 16
  EXPECT_GE(std::stod(metrics.at(5).at("seconds")), std::stod(metrics.at(4).at("seconds")));
  EXPECT_EQ(peaks_of({"--resume"}), "");
}

/// Resident bytes of rank `rank`. The system also counts the pages of peers' wire memory that it has read: these are excluded, as they are
/// counted for the peers.
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

// In addition to the allocator's requests there are code, stacks, libraries' own memory and cached free blocks.
TEST(PeakMemory, OfTheProcess) {
#if defined(SHEAF_ASAN) || defined(SHEAF_TSAN)
  GTEST_SKIP() << "a sanitizer's own memory would be counted";
#endif
  CorpusFolder folder;
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
    SheafProcess job(on_ranks(
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

}  // namespace
}  // namespace sheaf::testing
