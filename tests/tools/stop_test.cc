// A run that a signal stops saves its state, and with --resume it becomes what it would have been without the signal.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::Metrics;
using testing::Outcome;
using testing::run_sheaf;
using testing::SheafProcess;

using Words = std::vector<std::string>;
using std::chrono::milliseconds;

constexpr int64_t kSteps = 400;

struct Folder : testing::CorpusFolder {
  Words train(const std::string& out, const Words& more = {}) const {
    Words words = {"train", "--data.corpus", *this / "corpus.txt", "--output.folder", *this / out};
    for (const char* w : {"--model.layers",      "2",   "--model.heads",   "2",   "--model.width",
                          "16",                  "--model.context", "16", "--model.dropout", "0.1",
                          "--train.batch",       "5",   "--train.warmup",  "5",   "--train.eval_every",
                          "7",                   "--train.eval_tokens", "100", "--generate.tokens", "2"})
      words.emplace_back(w);
    words.insert(words.end(), {"--train.steps", std::to_string(kSteps)});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  Metrics metrics(const std::string& out) const {
    const std::string path = *this / out + "/metrics.jsonl";
    return std::filesystem::exists(path) ? testing::read_metrics(path) : Metrics();
  }
  std::string checkpoint(const std::string& out, int64_t step) const {
    return *this / out + "/checkpoints/step-" + std::to_string(step);
  }
};

// A pipe that nobody reads, and that is full: a page is all it takes.
struct FullPipe {
  explicit FullPipe(const std::string& path) {
    EXPECT_EQ(mkfifo(path.c_str(), 0600), 0);
    fd = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    EXPECT_EQ(fcntl(fd, F_SETPIPE_SZ, 4096), 4096);
    const std::string page(4096, '.');
    EXPECT_EQ(write(fd, page.data(), page.size()), 4096);
  }
  ~FullPipe() { close(fd); }
  std::string read_all() const {
    std::string all;
    char block[4096];
    for (ssize_t n; (n = read(fd, block, sizeof block)) > 0;) all.append(block, static_cast<size_t>(n));
    return all;
  }
  int fd;
};

void wait_for_steps(SheafProcess& job, const Folder& folder, const std::string& out, size_t steps) {
  while (job.running() && folder.metrics(out).size() < steps) std::this_thread::sleep_for(milliseconds(2));
}

/// Checks what a stopped run leaves, and resumes it to the end.
void expect_resumable(const Folder& folder, const std::string& out, int world, const Words& more, int signal,
                      const Outcome& stopped) {
  EXPECT_EQ(stopped.code, 128 + signal) << stopped.out << stopped.err;
  const std::string said = "stopped by signal " + std::to_string(signal) + " after step ";
  const size_t at = stopped.out.find(said);
  ASSERT_NE(at, std::string::npos) << stopped.out << stopped.err;
  const int64_t step = std::stoll(stopped.out.substr(at + said.size()));
  EXPECT_LT(step, kSteps);
  EXPECT_THAT(stopped.out, HasSubstr("saved to " + folder.checkpoint(out, step)));
  EXPECT_TRUE(std::filesystem::exists(folder.checkpoint(out, step) + "/manifest.json"));
  EXPECT_LE(folder.metrics(out).rbegin()->first, step);

  Words words = folder.train(out, more);
  words.emplace_back("--resume");
  const Outcome r = run_sheaf(testing::on_ranks(world, words));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("resumed from " + folder.checkpoint(out, step)));
  testing::expect_same_curve(folder.metrics(out), folder.metrics("whole"), out);
  for (int rank = 0; rank < world; ++rank) {
    char shard[64];
    std::snprintf(shard, sizeof shard, "/shard-%05d-of-%05d.safetensors", rank, world);
    const std::string ours = File::open(folder.checkpoint(out, kSteps) + shard).read_all();
    EXPECT_FALSE(ours.empty());
    EXPECT_TRUE(ours == File::open(folder.checkpoint("whole", kSteps) + shard).read_all()) << out << " rank " << rank;
  }
}

void stop_and_resume(int world, const Words& more) {
  Folder folder;
  ASSERT_EQ(run_sheaf(testing::on_ranks(world, folder.train("whole", more))).code, 0);
  int jobs = 0;
  for (int signal : {SIGTERM, SIGINT}) {
    const std::string out = "run-" + std::to_string(++jobs);
    SheafProcess job(testing::on_ranks(world, folder.train(out, more)));
    wait_for_steps(job, folder, out, 20);
    kill(job.pid(), signal);
    const Outcome stopped = job.wait();
    if (world > 1) {
      EXPECT_EQ(testing::lines_of(stopped.err).back(), "sheaf launch: stopped by signal " + std::to_string(signal));
    }
    expect_resumable(folder, out, world, more, signal, stopped);
  }
}

TEST(Stop, OnOneRank) { stop_and_resume(1, {}); }
TEST(Stop, OnTwoRanks) { stop_and_resume(2, {}); }
TEST(Stop, OnTwoRanksBetweenLoggedSteps) { stop_and_resume(2, {"--train.log_every", "10", "--train.eval_every", "0"}); }

TEST(Stop, OneRankThatHearsOfItStopsAll) {
  Folder folder;
  ASSERT_EQ(run_sheaf(testing::on_ranks(3, folder.train("whole"))).code, 0);
  for (size_t rank : {0, 2}) {
    const std::string out = "run-" + std::to_string(rank);
    SheafProcess job(testing::on_ranks(3, folder.train(out)));
    wait_for_steps(job, folder, out, 20);
    ASSERT_EQ(job.ranks().size(), 3u);
    kill(job.ranks()[rank], SIGTERM);
    expect_resumable(folder, out, 3, {}, SIGTERM, job.wait());
  }
}

TEST(Stop, GroupsMaySignalEachMember) {
  Folder folder;
  ASSERT_EQ(run_sheaf(testing::on_ranks(2, folder.train("whole"))).code, 0);
  SheafProcess job(testing::on_ranks(2, folder.train("run")));
  wait_for_steps(job, folder, "run", 20);
  for (int i = 0; i < 3; ++i) job.signal_all(SIGTERM);
  expect_resumable(folder, "run", 2, {}, SIGTERM, job.wait());
}

TEST(Stop, WhatCannotBeSavedIsSaid) {
  Folder folder;
  for (int world : {1, 2}) {
    const std::string out = "run-" + std::to_string(world);
    SheafProcess job(testing::on_ranks(world, folder.train(out)));
    wait_for_steps(job, folder, out, 20);
    std::ofstream(folder / out + "/checkpoints") << "in the way";
    kill(job.pid(), SIGTERM);
    const Outcome r = job.wait();
    EXPECT_EQ(r.code, 74) << r.err;
    EXPECT_THAT(r.err, HasSubstr("[checkpoint] cannot save '" + (folder / out)));
  }
}

TEST(Stop, OutputThatNobodyReadsHoldsUpNothing) {
  Folder folder;
  for (const bool is_stopped : {false, true}) {
    const std::string out = is_stopped ? "stopped" : "whole";
    const FullPipe pipe(folder / out + ".pipe");
    SheafProcess job(testing::on_ranks(2, folder.train(out)), {"SHEAF_TIMEOUT=20"}, folder / out + ".pipe");
    wait_for_steps(job, folder, out, 20);
    if (is_stopped) kill(job.pid(), SIGTERM);
    const Outcome r = job.wait();
    EXPECT_EQ(r.code, is_stopped ? 143 : 0) << r.err;
    EXPECT_THAT(r.err, HasSubstr("nobody reads standard output; training goes on"));
    EXPECT_TRUE(std::filesystem::exists(folder / out + "/checkpoints"));
    EXPECT_THAT(pipe.read_all(), ::testing::Not(HasSubstr("loss")));
  }
}

TEST(Stop, LinesThatNobodyReadAreCounted) {
  Folder folder;
  const FullPipe pipe(folder / "pipe");
  SheafProcess job(folder.train("run"), {}, folder / "pipe");
  wait_for_steps(job, folder, "run", 20);
  std::string seen;
  while (job.running()) {
    seen += pipe.read_all();
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(job.wait().code, 0);
  seen += pipe.read_all();
  EXPECT_THAT(seen, HasSubstr(" lines left out, which nobody read)\nstep "));
  EXPECT_THAT(seen, HasSubstr("validation loss"));
}

TEST(Stop, ASecondSignalEndsAtOnce) {
  Folder folder;
  SheafProcess job(testing::on_ranks(2, folder.train("run")));
  wait_for_steps(job, folder, "run", 20);
  const std::vector<pid_t> ranks = job.ranks();
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGSTOP);  // so that the step never ends
  kill(ranks[0], SIGTERM);
  std::this_thread::sleep_for(milliseconds(1500));
  ASSERT_TRUE(job.running());
  kill(ranks[0], SIGTERM);
  const Outcome r = job.wait();
  EXPECT_EQ(r.code, 72) << r.err;
  EXPECT_THAT(r.err, HasSubstr("was killed by signal 15"));
  EXPECT_FALSE(std::filesystem::exists(folder / "run/checkpoints"));
}

}  // namespace
}  // namespace sheaf
