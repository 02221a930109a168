// Killed at any moment and resumed at the same world, a run leaves the metrics of one that was never killed, bitwise. SHEAF_KILLS=20 asks
// for that many kills (a quarter of them inside a save), SHEAF_SEED for other moments; by default there are fewer.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf {
namespace {

using testing::expect_same_curve;
using ::testing::HasSubstr;
using testing::Metrics;
using testing::Outcome;
using testing::read_metrics;
using testing::run_sheaf;
using testing::SheafProcess;
using testing::operator+;

using Words = std::vector<std::string>;
using std::chrono::microseconds;

constexpr int64_t kSteps = 60;

struct Folder : testing::CorpusFolder {
  bool async = false;  // saves overlap with training
  bool f16 = false;    // near the largest scale of the loss, so that steps are occasionally skipped
  Words train(const std::string& out, bool resume = false) const {
    Words words = {"train",           "--data.corpus", *this / "corpus.txt",
                   "--output.folder", *this / out,     "--quiet"};
    if (resume) words.emplace_back("--resume");
    if (async) words.insert(words.end(), {"--train.save_async", "true"});
    if (f16) words.insert(words.end(), {"--train.dtype", "f16", "--train.loss_scale_interval", "4", "--train.loss_scale", "1e6"});
    for (const char* w :
         {"--model.layers",        "2",   "--model.heads",      "2",   "--model.width",      "16",
          "--model.context",       "16",  "--model.dropout",    "0.1", "--train.batch",      "5",
          "--train.micro_batches", "2",   "--train.warmup",     "5",   "--train.eval_every", "4",
          "--train.eval_tokens",   "200", "--train.save_every", "3"})
      words.emplace_back(w);
    words.insert(words.end(), {"--train.steps", std::to_string(kSteps)});
    return words;
  }
  std::string checkpoints(const std::string& out) const { return *this / out + "/checkpoints"; }
  std::string shard(const std::string& out, int64_t step, int rank, int world) const {
    char name[64];
    std::snprintf(name, sizeof name, "/step-%d/shard-%05d-of-%05d.safetensors",
                  static_cast<int>(step), rank, world);
    return checkpoints(out) + name;
  }
};

// Saves in progress: folders with ".tmp-" in their names are not committed yet.
std::set<std::string> pending_saves(const std::string& checkpoints) {
  std::set<std::string> out;
  std::error_code none;
  for (std::filesystem::directory_iterator it(checkpoints, none), end; !none && it != end;
       it.increment(none))
    if (it->path().filename().string().find(".tmp-") != std::string::npos)
      out.insert(it->path().filename());
  return out;
}

int64_t lines_in(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
}

class Killer {
 public:
  Killer(const Folder& folder, int world, uint32_t seed)
      : folder_(folder), world_(world), random_(seed) {}

  /// Runs until the run is complete or the next moment to kill; returns true if it was killed.
  bool run_and_kill(const std::string& out, bool inside_a_save, bool resume) {
    const std::string checkpoints = folder_.checkpoints(out),
                      metrics = folder_.path() + "/" + out + "/metrics.jsonl";
    const std::set<std::string> before = pending_saves(checkpoints);
    SheafProcess job(testing::on_ranks(world_, folder_.train(out, resume)));
    std::set<std::string> pending;
    if (inside_a_save) {
      // Not always the first save.
      int64_t skip = below(4);
      std::string last;
      while (job.running()) {
        pending = pending_saves(checkpoints);
        std::erase_if(pending, [&](const std::string& name) {
          return before.contains(name) || name == last;
        });
        if (pending.empty()) continue;
        if (skip-- == 0) break;
        last = *pending.begin();
      }
      std::this_thread::sleep_for(microseconds(below(1500)));
    } else if (below(5) == 0) {  // while it starts
      std::this_thread::sleep_for(microseconds(below(150'000)));
    } else {
      const int64_t target = lines_in(metrics) + below(kSteps / 3);
      while (job.running() && lines_in(metrics) < target)
        std::this_thread::sleep_for(microseconds(200));
      std::this_thread::sleep_for(microseconds(below(20'000)));
    }
    if (!job.running()) {
      EXPECT_EQ(job.wait().code, 0) << job.wait().err;
      return false;
    }
    // One rank, or all ranks.
    const std::vector<pid_t> ranks = job.ranks();
    const bool one = world_ > 1 && ranks.size() == static_cast<size_t>(world_) && below(2) == 0;
    if (one)
      kill(ranks[static_cast<size_t>(below(world_))], SIGKILL);
    else
      job.signal_all(SIGKILL);
    const Outcome ended = job.wait();
    if (ended.code == 0) return false;  // the process had already ended
    EXPECT_EQ(ended.code, one ? 72 : 128 + SIGKILL) << ended.err;
    if (!inside_a_save) return true;
    const std::set<std::string> left = pending_saves(checkpoints);
    return std::any_of(left.begin(), left.end(),
                       [&](const std::string& name) { return !before.contains(name); });
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  const Folder& folder_;
  const int world_;
  std::mt19937 random_;
};

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

void kill_and_resume(int world, int kills, bool async = false, bool f16 = false) {
  Folder folder;
  folder.async = async;
  folder.f16 = f16;
  ASSERT_EQ(run_sheaf(testing::on_ranks(world, folder.train("whole"))).code, 0);
  const Metrics expected = folder.metrics("whole");
  ASSERT_EQ(expected.size(), static_cast<size_t>(kSteps));
  if (f16) {
    EXPECT_GE(std::stoi(expected.at(kSteps).at("skipped_steps")), 4);
  }
  const int in_save = (kills + 3) / 4;
  int done = 0, done_in_save = 0, runs = 0, starts = 0;
  Killer killer(folder, world,
                static_cast<uint32_t>(10 * from_environment("SHEAF_SEED", 1) + world));
  std::string out;
  bool fresh = true;
  while (done < kills) {
    ASSERT_LT(++starts, 12 * kills);
    if (fresh) out = "run-" + std::to_string(runs++);
    const bool wants_save =
        done_in_save * kills < done * in_save || kills - done <= in_save - done_in_save;
    const bool killed = killer.run_and_kill(out, wants_save, !fresh);
    fresh = false;
    if (killed) {
      ++done;
      done_in_save += wants_save;
      if (done < kills) continue;
    }
    const Outcome end = run_sheaf(testing::on_ranks(world, folder.train(out, true)));
    ASSERT_EQ(end.code, 0) << end.err;
    EXPECT_EQ(end.err, "");
    expect_same_curve(folder.metrics(out), expected, out);
    // A save removes leftovers of earlier ones; after a kill in the last save of a finished run, no further save follows.
    EXPECT_LE(pending_saves(folder.checkpoints(out)).size(), 1u);
    fresh = true;
  }
  std::printf("world %d: %d kills, %d of them inside a save, %d runs\n", world, done, done_in_save,
              runs);
  EXPECT_GE(done_in_save, in_save);
}

TEST(Resume, KilledAtAnyMomentOnOneRank) { kill_and_resume(1, from_environment("SHEAF_KILLS", 6)); }
TEST(Resume, KilledAtAnyMomentOnTwoRanks) {
  kill_and_resume(2, from_environment("SHEAF_KILLS", 6));
}
TEST(Resume, KilledAtAnyMomentWhileSavingGoesOnBeside) {
  for (int world : {1, 2}) kill_and_resume(world, from_environment("SHEAF_KILLS", 6), /*async=*/true);
}

TEST(Resume, KilledAtAnyMomentInF16) {
  kill_and_resume(1, from_environment("SHEAF_KILLS", 6), false, /*f16=*/true);
  kill_and_resume(2, from_environment("SHEAF_KILLS", 6), /*async=*/true, /*f16=*/true);
}

// Lets the last steps be repeated: the checkpoint of step 60 is removed, as if it had never been written.
void rewind(const Folder& folder, const std::string& out) {
  std::filesystem::remove_all(folder.checkpoints(out) + "/step-60");
}

TEST(Resume, BrokenNewestIsNamedAndTheOneBeforeUsed) {
  Folder folder;
  for (int world : {1, 2}) {
    const std::string out = "run-" + std::to_string(world);
    ASSERT_EQ(run_sheaf(testing::on_ranks(world, folder.train(out))).code, 0);
    const Metrics expected = folder.metrics(out);
    const std::string shard = folder.shard(out, 60, world - 1, world);  // seen by the last rank
    std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
    const Outcome r = run_sheaf(testing::on_ranks(world, folder.train(out, true)));
    EXPECT_EQ(r.code, 0) << r.err;
    const auto lines = testing::lines_of(r.err);
    ASSERT_EQ(lines.size(), 1u) << r.err;
    EXPECT_THAT(lines[0], HasSubstr("warning: checkpoint '" + folder.checkpoints(out) +
                                    "/step-60' is broken"));
    EXPECT_THAT(lines[0], HasSubstr(shard));
    expect_same_curve(folder.metrics(out), expected, out);
    EXPECT_EQ(run_sheaf({"generate", folder / out, "--generate.tokens", "5"}).code,
              0);  // intact again
  }
}

TEST(Resume, ABrokenCheckpointDoesNotPushOutAGoodOne) {
  Folder folder;
  for (const bool async : {false, true}) {
    folder.async = async;
    const std::string out = async ? "async" : "run", shard = folder.shard(out, 60, 0, 1);
    ASSERT_EQ(run_sheaf(folder.train(out)).code, 0);
    std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
    Words further = folder.train(out, true);
    further.insert(further.end(), {"--train.steps", "62", "--train.decay_end", "60", "--train.save_every", "0"});
    const Outcome r = run_sheaf(further);
    EXPECT_EQ(r.code, 0) << r.err;
    std::set<std::string> steps;
    for (const auto& step : std::filesystem::directory_iterator(folder.checkpoints(out))) steps.insert(step.path().filename());
    EXPECT_EQ(steps, (std::set<std::string>{"step-57", "step-62"}));
  }
}

TEST(Resume, StartsFromTheStartWhereThereIsNone) {
  Folder folder;
  Words loud = folder.train("run", true);
  std::erase(loud, "--quiet");
  const Outcome r = run_sheaf(loud);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_TRUE(r.out.starts_with("no checkpoint in " + folder.checkpoints("run") +
                                ": the run starts from the beginning\n"))
      << r.out;
  EXPECT_EQ(folder.metrics("run").size(), static_cast<size_t>(kSteps));
  // Resuming a complete run changes nothing.
  const Metrics before = folder.metrics("run");
  EXPECT_EQ(run_sheaf(folder.train("run", true)).code, 0);
  EXPECT_EQ(folder.metrics("run"), before);
}

TEST(Resume, WhatAKillLeftOfReplacedFilesIsRemoved) {
  Folder folder;
  const std::filesystem::path run = folder / "run";
  std::filesystem::create_directories(run);
  for (const char* name : {"config.toml.tmp-12", "metrics.jsonl.tmp-12", "model.safetensors.tmp-12"}) std::ofstream(run / name) << "half";
  ASSERT_EQ(run_sheaf(folder.train("run", true)).code, 0);
  EXPECT_FALSE(std::filesystem::exists(run / "config.toml.tmp-12"));
  EXPECT_FALSE(std::filesystem::exists(run / "metrics.jsonl.tmp-12"));
  EXPECT_TRUE(std::filesystem::exists(run / "model.safetensors.tmp-12")) << "which an export may be writing";
}

TEST(Resume, NeedsNoOptionsAgain) {
  Folder folder;
  ASSERT_EQ(run_sheaf(folder.train("run")).code, 0);
  const Metrics expected = folder.metrics("run");
  const Words again = {"train", "--resume", "--output.folder", folder / "run"};
  for (int world : {1, 2}) {
    rewind(folder, "run");
    const Outcome r = run_sheaf(testing::on_ranks(world, again));
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("resumed from " + folder.checkpoints("run") + "/step-57"));
    if (world == 1) expect_same_curve(folder.metrics("run"), expected, "resumed");
  }
  // Given options win, and are compared.
  Words other = again;
  other.insert(other.end(), {"--train.eval_every", "0", "--train.lr", "0.5"});
  EXPECT_EQ(run_sheaf(other).code, 76);
  other.back() = "0.001";
  EXPECT_EQ(run_sheaf(other).code, 0);
  EXPECT_EQ(run_sheaf({"train", "--resume", "--output.folder", folder / "none"}).code, 64);
}

// A run may be extended beyond the end of its decay, like one that was longer from the start.
TEST(Resume, BeyondTheDecay) {
  Folder folder;
  const Words longer = {"--train.steps", "75", "--train.decay_end", "60"};
  const auto more = [&](Words words) {
    words.insert(words.end(), longer.begin(), longer.end());
    return words;
  };
  ASSERT_EQ(run_sheaf(folder.train("run")).code, 0);
  ASSERT_EQ(run_sheaf(more(folder.train("whole"))).code, 0);
  Words steps_alone = folder.train("run", true);
  steps_alone.back() = "75";
  const Outcome refused = run_sheaf(steps_alone);
  EXPECT_EQ(refused.code, 76) << refused.err;
  EXPECT_THAT(refused.err,
              HasSubstr("train.decay_end, by default train.steps, was 60 in the checkpoint and is 75 now"));
  EXPECT_THAT(refused.err, HasSubstr("give --train.decay_end 60 to change the number of steps alone"));
  ASSERT_EQ(run_sheaf(more(folder.train("run", true))).code, 0);
  const Metrics resumed = folder.metrics("run");
  ASSERT_EQ(resumed.size(), 75u);
  EXPECT_EQ(resumed.at(75).at("lr"), "1e-04");  // train.min_lr
  expect_same_curve(resumed, folder.metrics("whole"), "resumed");
}

// A run that already has all requested steps says so, and how to extend it; that works.
TEST(Resume, NothingToTrainIsSaid) {
  Folder folder;
  ASSERT_EQ(run_sheaf(folder.train("run")).code, 0);
  const auto resumed = [&](const Words& more) {
    Words words = {"train", "--resume", "--output.folder", folder / "run"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome r = run_sheaf(words);
    testing::expect_ok(r);
    return r.out;
  };
  EXPECT_THAT(resumed({}),
              HasSubstr("the run is complete at step 60: nothing is left to train, as train.steps is 60; to go on, give --train.steps above "
                        "60 and --train.decay_end 60, after which the learning rate stays at train.min_lr\n"));
  const Words longer = {"--train.decay_end", "60", "--train.steps"};
  EXPECT_THAT(resumed(longer + Words{"40"}), HasSubstr("nothing is left to train, as train.steps is 40; to go on, give --train.steps above 60\n"));
  EXPECT_THAT(resumed(longer + Words{"61"}), HasSubstr("step 61/61"));
  EXPECT_EQ(folder.metrics("run").size(), 61u);
}

// A learning rate that has only warmed up does not depend on the number of steps.
TEST(Resume, ARunThatWasAllWarmUpGoesOn) {
  Folder folder;
  const auto train = [&](const std::string& out, const char* steps, bool resume) {
    return folder.train(out, resume) + Words{"--train.warmup", "20", "--train.steps", steps};
  };
  ASSERT_EQ(run_sheaf(train("run", "10", false)).code, 0);
  ASSERT_EQ(run_sheaf(train("whole", "30", false)).code, 0);
  testing::expect_ok(run_sheaf(train("run", "30", true)));
  Metrics resumed = folder.metrics("run"), whole = folder.metrics("whole");
  ASSERT_EQ(resumed.size(), 30u);
  resumed.at(10).erase("val_loss");  // of its end then
  expect_same_curve(resumed, whole, "resumed");
  testing::expect_refused(run_sheaf(train("run", "40", true)), 76, "train.decay_end, by default train.steps, was 30");
}

// Once, by rank 0, though the others know it, too.
TEST(Resume, AWarmUpBeyondTheEndIsSaid) {
  Folder folder;
  const std::string note = "note: train.warmup 70 is more than the run's 60 steps: the learning rate never reaches train.lr 0.001\n";
  const Outcome r = run_sheaf(testing::on_ranks(2, folder.train("run") + Words{"--train.warmup", "70"}));
  testing::expect_ok(r);
  const size_t at = r.out.find(note);
  ASSERT_NE(at, std::string::npos) << r.out;
  EXPECT_EQ(r.out.find("train.warmup", at + note.size()), std::string::npos) << r.out;
  for (const char* warmup : {"60", "5"})
    EXPECT_THAT(run_sheaf(folder.train(str("run-", warmup)) + Words{"--train.warmup", warmup}).out, ::testing::Not(HasSubstr("warmup")));
}

TEST(Resume, AtAnotherWorldAndGeneratesOnOneProcess) {
  Folder folder;
  ASSERT_EQ(run_sheaf(testing::on_ranks(2, folder.train("run"))).code, 0);
  const Metrics expected = folder.metrics("run");
  const auto sample = run_sheaf(
      {"generate", folder / "run", "--generate.prompt", "the ", "--generate.tokens", "50"});
  EXPECT_EQ(sample.code, 0) << sample.err;
  EXPECT_TRUE(sample.out.starts_with("the ")) << sample.out;
  EXPECT_EQ(sample.out.size(), 4u + 50 + 1);
  for (int world : {3, 1}) {
    rewind(folder, "run");
    const Outcome r = run_sheaf(testing::on_ranks(world, folder.train("run", true)));
    EXPECT_EQ(r.code, 0) << r.err;
    const Metrics resumed = folder.metrics("run");
    ASSERT_EQ(resumed.size(), expected.size());
    for (int64_t s = 1; s <= kSteps; ++s) {
      const double was = std::stod(expected.at(s).at("loss")),
                   is = std::stod(resumed.at(s).at("loss"));
      EXPECT_NEAR(is, was, s <= 57 ? 0 : 1e-4 * was) << s;
    }
  }
  const auto expect_close = [&] {
    for (int64_t s = 1; s <= kSteps; ++s) {
      const double was = std::stod(expected.at(s).at("loss"));
      EXPECT_NEAR(std::stod(folder.metrics("run").at(s).at("loss")), was, s <= 57 ? 0 : 1e-4 * was) << s;
    }
  };
  for (const Words& options : {Words{"--sharding.tensor", "2"}, Words{"--sharding.context", "2", "--sharding.tensor", "1"},
                               Words{"--sharding.replicas", "2", "--sharding.context", "1"}}) {
    rewind(folder, "run");
    Words groups = testing::on_ranks(4, folder.train("run", true));
    groups.insert(groups.end(), options.begin(), options.end());
    EXPECT_EQ(run_sheaf(groups).code, 0);
    expect_close();
  }
  const Outcome three = run_sheaf(testing::on_ranks(3, {"train", "--resume", "--output.folder", folder / "run"}));
  EXPECT_EQ(three.code, 64);
  EXPECT_THAT(three.err, HasSubstr("3 ranks cannot be divided"));
  rewind(folder, "run");
  EXPECT_EQ(run_sheaf(testing::on_ranks(2, folder.train("run", true))).code, 0);
  expect_close();
}

}  // namespace
}  // namespace sheaf
