// The command on a GPU: it trains, saves and resumes there, and a CPU resumes a GPU's checkpoint.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/needs_gpu.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::Metrics;
using testing::Outcome;
using testing::run_sheaf;
using testing::SheafProcess;
using Words = std::vector<std::string>;

struct Folder : ScratchFolder {
  Folder() { std::ofstream(*this / "corpus.txt") << testing::sample_text(3000); }
  Words train(const std::string& out, bool resume = false, bool tune = false) const {
    Words words = {"train",          "--data.corpus",       *this / "corpus.txt", "--output.folder",
                   *this / out,      "--model.layers",      "2",                  "--model.heads",
                   "2",              "--model.width",       "16",                 "--model.context",
                   "16",             "--model.dropout",     "0.1",                "--train.batch",
                   "5",              "--train.steps",       "40",                 "--train.warmup",
                   "5",              "--train.save_every",  "3",                  "--train.eval_every",
                   "10",             "--train.eval_tokens", "200",                "--generate.tokens",
                   "10"};
    // Runs that are compared need the same algorithms, and the fastest ones differ from run to run.
    words.insert(words.end(), {"--train.tune_products", tune ? "true" : "false"});
    if (resume) words.emplace_back("--resume");
    return words;
  }
  Metrics metrics(const std::string& out) const {
    return testing::read_metrics(*this / out + "/metrics.jsonl");
  }
};

const Words kOnGpu = {"SHEAF_DEVICE=cuda"};

TEST(TrainOnGpu, KilledAndResumedItHasTheCurveOfAnUnbrokenRun) {
  SHEAF_NEEDS_GPU();
  Folder folder;
  Outcome r = run_sheaf(folder.train("whole"), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("GPU, cuda:0"));
  EXPECT_THAT(r.out, HasSubstr("(equal)"));
  {
    SheafProcess job(folder.train("broken"), kOnGpu);
    while (job.running() && (!std::ifstream(folder / "broken/metrics.jsonl") ||
                             folder.metrics("broken").size() < 15))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    job.signal_all(SIGKILL);
    job.wait();
  }
  r = run_sheaf(folder.train("broken", true), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  testing::expect_same_curve(folder.metrics("broken"), folder.metrics("whole"), "resumed");
  // A text generated from a checkpoint.
  r = run_sheaf({"generate", folder / "whole", "--generate.tokens", "10"}, kOnGpu);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_FALSE(r.out.empty());
  r = run_sheaf({"generate", folder / "whole", "--generate.tokens", "10"}, {"SHEAF_DEVICE=cpu"});
  EXPECT_EQ(r.code, 0) << r.err;
}

TEST(TrainOnGpu, ResumedItComputesWithTheAlgorithmsThatWereChosenByTiming) {
  SHEAF_NEEDS_GPU();
  Folder folder;
  const auto keeping_all = [&](bool resume) {
    Words words = folder.train("run", resume, true);
    words.insert(words.end(), {"--output.keep_checkpoints", "0"});
    return words;
  };
  Outcome r = run_sheaf(keeping_all(false), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  const Metrics whole = folder.metrics("run");
  const std::string manifest = folder / "run/checkpoints/step-18/manifest.json";
  const std::string kept = File::open<IoError>(manifest).read_all();
  EXPECT_THAT(kept, HasSubstr("sheaf products 1 "));
  for (const auto& entry : std::filesystem::directory_iterator(folder / "run/checkpoints"))
    if (std::stoi(entry.path().filename().string().substr(5)) > 18)
      std::filesystem::remove_all(entry.path());
  r = run_sheaf(keeping_all(true), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("checkpoints/step-18"));
  testing::expect_same_curve(folder.metrics("run"), whole, "resumed");
}

/// Contents, by name, of a run's last checkpoint.
std::map<std::string, std::string> checkpoint_files(const std::string& out) {
  std::string newest;
  for (const auto& entry : std::filesystem::directory_iterator(out + "/checkpoints"))
    newest = std::max(newest, entry.path().string());
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(newest))
    if (entry.is_regular_file())
      files[std::filesystem::relative(entry.path(), newest)] =
          File::open<IoError>(entry.path()).read_all();
  return files;
}

TEST(TrainOnGpu, StepsThatAreReplayedLeaveTheSameFilesKilledAndResumedToo) {
  SHEAF_NEEDS_GPU();
  Folder folder;
  Outcome r = run_sheaf(folder.train("plain"), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto graph = [&](const std::string& out, bool resume) {
    Words words = folder.train(out, resume);
    words.insert(words.end(), {"--train.cuda_graph", "true"});
    return words;
  };
  {
    SheafProcess job(graph("graph", false), kOnGpu);
    while (job.running() &&
           (!std::ifstream(folder / "graph/metrics.jsonl") || folder.metrics("graph").size() < 15))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    job.signal_all(SIGKILL);
    job.wait();
  }
  r = run_sheaf(graph("graph", true), kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("resumed from "));
  testing::expect_same_curve(folder.metrics("graph"), folder.metrics("plain"), "as a graph");
  const auto files = checkpoint_files(folder / "plain");
  EXPECT_GE(files.size(), 2u);
  EXPECT_EQ(checkpoint_files(folder / "graph"), files);
}

TEST(TrainOnGpu, GraphsNeedOne) {
  Folder folder;
  Words words = folder.train("none");
  words.insert(words.end(), {"--train.cuda_graph", "true"});
  const Outcome r = run_sheaf(words, {"SHEAF_DEVICE=cpu"});
  EXPECT_EQ(r.code, 64);
  EXPECT_THAT(r.err, HasSubstr("[train] train.cuda_graph: this run computes on CPUs"));
}

TEST(TrainOnGpu, AStepHasATimeLineUnlessItIsAGraph) {
  SHEAF_NEEDS_GPU();
  Folder folder;
  Words words = folder.train("traced");
  words.insert(words.end(), {"--output.trace_step", "2"});
  Outcome r = run_sheaf(words, kOnGpu);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("step 2 took rank 0 "));
  EXPECT_TRUE(std::filesystem::exists(folder / "traced/trace.json"));
  words = folder.train("none");
  words.insert(words.end(), {"--output.trace_step", "2", "--train.cuda_graph", "true"});
  r = run_sheaf(words, kOnGpu);
  EXPECT_EQ(r.code, 64);
  EXPECT_THAT(r.err, HasSubstr("[train] output.trace_step: what runs in a graph"));
}

TEST(TrainOnGpu, WhatIsMissingIsSaid) {
  Folder folder;
  const Outcome wrong = run_sheaf(folder.train("none"), {"SHEAF_DEVICE=gpu"});
  EXPECT_EQ(wrong.code, 64);
  EXPECT_THAT(wrong.err, HasSubstr("[device] SHEAF_DEVICE='gpu' is none of auto, cpu and cuda"));
  if constexpr (kernels::kHasCuda)
    if (kernels::cuda::device_count() > 0) return;
  const Outcome missing = run_sheaf(folder.train("none"), kOnGpu);
  EXPECT_EQ(missing.code, 64);
  EXPECT_THAT(missing.err, HasSubstr("[device] SHEAF_DEVICE=cuda, but "));
}

}  // namespace
}  // namespace sheaf
