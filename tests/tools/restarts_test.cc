// A training run that its launcher restarts ends with the bits of an uninterrupted run.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::operator+;
using testing::on_ranks;
using testing::Outcome;
using testing::run_sheaf;
using testing::SheafProcess;
using testing::Words;

struct Folder : testing::CorpusFolder {
  Words train(const std::string& out, const Words& more = {}) const {
    return Words{"train"} + testing::kTinyRun + data(out) +
           Words{"--model.dropout", "0.1", "--train.steps", "300", "--train.save_every", "10"} + more;
  }
  /// Step of the newest checkpoint; 0 if there is none.
  int64_t newest(const std::string& out) const {
    int64_t step = 0;
    std::error_code none;
    for (const auto& folder : std::filesystem::directory_iterator(*this / out + "/checkpoints", none))
      if (const std::string name = folder.path().filename(); name.find(".tmp-") == std::string::npos)
        step = std::max<int64_t>(step, std::stoll(name.substr(name.find('-') + 1)));
    return step;
  }
  /// All files of the last checkpoint.
  std::map<std::string, std::string> end(const std::string& out) const {
    std::map<std::string, std::string> files;
    for (const auto& file : std::filesystem::directory_iterator(*this / out + "/checkpoints/step-300"))
      files[file.path().filename()] = File::open(file.path()).read_all();
    return files;
  }
};

/// Two ranks, with up to this many restarts. Each is a shell that does `first` before it becomes the command.
Words launch(int restarts, const std::string& first, const Words& command) {
  const Words words = on_ranks(2, command);
  const auto program = std::find(words.begin(), words.end(), "--") + 1;
  return Words{"launch", "--max-restarts", std::to_string(restarts)} + Words(words.begin() + 1, program) +
         Words{"sh", "-c", first + "; exec \"$@\"", "sh"} + Words(program, words.end());
}

TEST(Restarts, KilledRanksChangeNothing) {
  Folder folder;
  ASSERT_EQ(run_sheaf(on_ranks(2, folder.train("whole"))).code, 0);
  // Once before there is a checkpoint, and once later.
  const std::string early = "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then kill -9 $$; fi";
  SheafProcess job(launch(2, early, folder.train("run")));
  while (job.running() && folder.newest("run") < 20) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_EQ(job.ranks().size(), 2u);
  kill(job.ranks()[0], SIGKILL);
  const Outcome r = job.wait();
  ASSERT_EQ(r.code, 0) << r.err;
  const std::vector<std::string> lines = testing::lines_of(r.err);
  EXPECT_THAT(lines, Contains(EndsWith(") was killed by signal 9; try 2 of 3 in 1 s")).Times(1));
  EXPECT_THAT(lines.back(), EndsWith(") was killed by signal 9; try 3 of 3 in 1 s"));
  const std::string checkpoints = folder / "run/checkpoints";
  EXPECT_THAT(r.out, HasSubstr("no checkpoint in " + checkpoints + ": the run starts from the beginning"));
  EXPECT_THAT(r.out, HasSubstr("resumed from " + checkpoints + "/step-"));
  testing::expect_same_curve(folder.metrics("run"), folder.metrics("whole"), "run");
  EXPECT_TRUE(folder.end("run") == folder.end("whole"));
}

// Like torchrun on several hosts: only the agent that saw the failure counts it.
TEST(Restarts, OneRankThatKnowsIsEnough) {
  Folder folder;
  ASSERT_EQ(run_sheaf(on_ranks(2, folder.train("run"))).code, 0);
  const std::string know = "export TORCHELASTIC_RESTART_COUNT=1", alone = "export LOCAL_WORLD_SIZE=1; ";
  const Outcome counted = run_sheaf(launch(0, alone + "if [ $RANK = 1 ]; then " + know + "; fi", folder.train("run")));
  const Outcome not_counted = run_sheaf(launch(0, alone + "true", folder.train("run")));
  EXPECT_EQ(counted.code, 0) << counted.err;
  EXPECT_THAT(counted.out, HasSubstr("the run is complete at step 300"));
  EXPECT_EQ(not_counted.code, 64);
  EXPECT_THAT(not_counted.err, HasSubstr("holds checkpoints of an earlier run"));
}

// Rank 1 is killed while rank 0 is about to wait for it: another try must not go on with the run that the folder has.
TEST(Restarts, WhatFailsAtTheStartDoesNotContinueAnEarlierRun) {
  Folder folder;
  ASSERT_EQ(run_sheaf(folder.train("run", {"--train.steps", "4"})).code, 0);
  const std::string killed = "i=0; while [ $RANK = 1 ] && [ $i -lt 100 ] && grep -q ' [0-9]' /proc/$PPID/task/$PPID/children; do sleep 0.1; "
                             "i=$((i+1)); done; if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then kill -9 $$; fi";
  const Outcome r = run_sheaf(launch(1, killed, folder.train("run", {"--train.steps", "4"})));
  EXPECT_EQ(r.code, 64) << r.out;
  EXPECT_THAT(testing::lines_of(r.err), ElementsAre(AllOf(HasSubstr("holds checkpoints of an earlier run"), EndsWith("; it is not tried again"))));
}

TEST(Restarts, AStoppedRunThatCannotBeSavedIsNotTriedAgain) {
  Folder folder;
  SheafProcess job(launch(3, "true", folder.train("run", {"--train.steps", "100000", "--train.save_every", "0"})));
  while (job.running() && !std::filesystem::exists(folder / "run/metrics.jsonl")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::filesystem::path checkpoints = folder / "run/checkpoints";
  std::filesystem::remove_all(checkpoints);
  std::ofstream{checkpoints};  // where a folder should be
  while (job.running() && folder.metrics("run").size() < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_EQ(job.ranks().size(), 2u);
  kill(job.ranks()[1], SIGTERM);
  const Outcome r = job.wait();
  EXPECT_EQ(r.code, 74) << r.err;
  EXPECT_THAT(testing::lines_of(r.err).back(), AllOf(HasSubstr(") exited with code 74: after signal 15: [checkpoint] cannot save '"),
                                                     EndsWith("; it is not tried again")));
}

TEST(Restarts, ThreadsThatCannotBeStartedAreSaid) {
  Folder folder;
  const Outcome r = run_sheaf(launch(0, "ulimit -s 1000000000000", folder.train("run")));  // no stack is that large
  EXPECT_EQ(r.code, 74) << r.err;
  EXPECT_THAT(testing::lines_of(r.err).back(), EndsWith(": this process may start no more threads (ulimit -u)"));
}

// A refused command is not retried.
TEST(Restarts, WhatIsRefusedIsNotTriedAgain) {
  Folder folder;
  const Outcome r = run_sheaf(launch(3, "true", folder.train("run", {"--model.heads", "3"})));
  EXPECT_EQ(r.code, 64);
  EXPECT_THAT(testing::lines_of(r.err), ElementsAre(EndsWith("model.heads 3; it is not tried again")));
}

}  // namespace
}  // namespace sheaf
