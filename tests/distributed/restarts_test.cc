// `max_restarts` of the launcher, on shell scripts: which failures are retried, how often, as which job, and what ends it.
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/distributed/launcher.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;
using std::chrono::milliseconds;

struct Start {
  int restart, rank;
  std::string port, token;
};

struct Outcome {
  int code;
  std::vector<std::string> lines = {};  ///< on standard error
  std::vector<Start> starts = {};       ///< of ranks, as each wrote it down
};

Outcome launch(int ranks, int max_restarts, const std::string& script, milliseconds pause = milliseconds(10)) {
  ScratchFolder folder;
  const std::string note = "starts=" + folder / "starts" + "; echo $TORCHELASTIC_RESTART_COUNT $RANK $MASTER_PORT $SHEAF_TOKEN >> $starts; ";
  ::testing::internal::CaptureStderr();
  Outcome out{distributed::launch({.nproc = ranks, .threads_per_rank = 1, .max_restarts = max_restarts, .pause = pause,
                                   .command = {"sh", "-c", note + script}})};
  std::istringstream said(::testing::internal::GetCapturedStderr());
  for (std::string line; std::getline(said, line);) out.lines.push_back(line);
  std::ifstream starts(folder / "starts");
  for (Start s; starts >> s.restart >> s.rank >> s.port >> s.token;) out.starts.push_back(s);
  return out;
}

TEST(Restarts, AllRanksStartAgainAsAnotherJob) {
  const Outcome r = launch(2, 3, "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then kill -9 $$; fi");
  EXPECT_EQ(r.code, 0);
  const std::string killed = ") was killed by signal 9; try ";
  EXPECT_THAT(r.lines, ElementsAre(EndsWith(killed + "2 of 4 in 0.01 s"), EndsWith(killed + "3 of 4 in 0.01 s")));
  for (const std::string& line : r.lines) EXPECT_THAT(line, StartsWith("sheaf launch: rank 1 (pid "));
  std::set<std::pair<int, int>> ranks;
  std::set<std::pair<std::string, std::string>> meetings;
  std::set<std::string> tokens;
  for (const Start& s : r.starts) {
    ranks.emplace(s.restart, s.rank);
    meetings.emplace(s.port, s.token);
    tokens.insert(s.token);
  }
  EXPECT_THAT(r.starts, SizeIs(6));
  EXPECT_THAT(ranks, SizeIs(6));
  EXPECT_THAT(tokens, SizeIs(3));
  EXPECT_THAT(meetings, SizeIs(3));
}

TEST(Restarts, FailuresThatAnotherTryMayCure) {
  const Outcome r = launch(1, 8, "set -- 1 71 72 74 70 137 139 255 3; shift $TORCHELASTIC_RESTART_COUNT; exit $1");
  EXPECT_EQ(r.code, 3);
  EXPECT_THAT(r.starts, SizeIs(9));
  ASSERT_THAT(r.lines, SizeIs(9));
  EXPECT_THAT(r.lines[1], EndsWith(") exited with code 71; try 3 of 9 in 0.01 s"));
  EXPECT_THAT(r.lines[8], EndsWith(") exited with code 3; that was try 9 of 9"));
}

TEST(Restarts, FailuresAfterASignalAreNoneToCure) {
  for (const auto& [reason, starts] : {std::pair{"after signal 15: the disk is full", 1}, {"after signal 9: the disk is full", 2}}) {
    const Outcome r = launch(1, 1, str("echo '", reason, "' > /dev/fd/$SHEAF_ERROR_FD; exit 74"));
    EXPECT_EQ(r.code, 74);
    EXPECT_THAT(r.starts, SizeIs(starts));
    ASSERT_FALSE(r.lines.empty());
    EXPECT_THAT(r.lines[0], HasSubstr(str(") exited with code 74: ", reason)));
  }
}

TEST(Restarts, FailuresThatWouldComeAgainOrWereAskedFor) {
  for (const std::string end : {"exit 64", "exit 65", "exit 73", "exit 75", "exit 76", "exit 126", "exit 127", "exit 129",
                                "exit 130", "exit 143", "kill -TERM $$"}) {
    const Outcome r = launch(1, 2, end);
    EXPECT_EQ(r.code, end.starts_with("exit") ? std::stoi(end.substr(5)) : 72);
    EXPECT_THAT(r.starts, SizeIs(1)) << end;
    EXPECT_THAT(r.lines, ElementsAre(EndsWith("; it is not tried again"))) << end;
  }
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(distributed::launch({.nproc = 1, .max_restarts = 2, .command = {"/no/such/program"}}), 64);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("cannot run /no/such/program"));
}

// Rank 0's failure is only a consequence of rank 1's, though it ends first.
TEST(Restarts, TheFailureThatIsNamedDecides) {
  const std::string others = "if [ $RANK = 0 ]; then exit 72; fi; sleep 0.3; ";
  EXPECT_THAT(launch(2, 1, others + "exit 75").starts, SizeIs(2));
  EXPECT_THAT(launch(2, 1, others + "exit 74").starts, SizeIs(4));
}

TEST(Restarts, NoneByDefault) {
  const Outcome r = launch(1, 0, "exit 1");
  EXPECT_EQ(r.code, 1);
  EXPECT_THAT(r.starts, SizeIs(1));
  EXPECT_THAT(r.lines, ElementsAre(EndsWith(") exited with code 1")));
  for (int wrong : {-1, 1 << 30})
    EXPECT_THROW(distributed::launch({.nproc = 1, .max_restarts = wrong, .command = {"true"}}), ConfigError);
}

TEST(Restarts, ASignalBetweenTriesEndsTheJob) {
  // Sent when the launcher has no ranks any more.
  const Outcome r = launch(1, 3, "l=$PPID; { while grep -q . /proc/$l/task/$l/children; do sleep 0.01; done; kill -TERM $l; } & exit 1",
                           milliseconds(60'000));
  EXPECT_EQ(r.code, 128 + SIGTERM);
  EXPECT_THAT(r.starts, SizeIs(1));
  EXPECT_THAT(r.lines, ElementsAre(EndsWith("; try 2 of 4 in 60 s"), "sheaf launch: stopped by signal 15"));
}

// A rank that does not end is killed three seconds after it was told to, not half a minute after the signal.
TEST(Restarts, ASignalDoesNotProlongTheEndOfAFailedTry) {
  const auto start = std::chrono::steady_clock::now();
  const Outcome r = launch(2, 3, "if [ $RANK = 1 ]; then exit 1; fi; l=$PPID; trap '' INT; trap 'touch $starts.told' TERM; "
                                 "{ until [ -e $starts.told ]; do sleep 0.05; done; kill -INT $l; } & while true; do sleep 0.1; done");
  EXPECT_EQ(r.code, 1);
  EXPECT_THAT(r.starts, SizeIs(2));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Restarts, ASignalWhileAFailedTryEndsIsTheLast) {
  // Rank 0 sends the signal once the launcher has seen rank 1's end; it is passed on to rank 0, which it ends.
  const Outcome r = launch(2, 3, "if [ $RANK = 1 ]; then exit 1; fi; l=$PPID; until grep -q '^0 1 ' $starts; do sleep 0.01; done; "
                                 "while grep -q ' [0-9]' /proc/$l/task/$l/children; do sleep 0.01; done; kill -TERM $l; exec sleep 60");
  EXPECT_EQ(r.code, 1);
  EXPECT_THAT(r.starts, SizeIs(2));
  EXPECT_THAT(r.lines, ElementsAre(EndsWith(") exited with code 1")));
}

}  // namespace
}  // namespace sheaf
