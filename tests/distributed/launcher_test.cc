#include "sheaf/distributed/launcher.h"

#include <gtest/gtest.h>

#include <sys/resource.h>

#include <csignal>

#include "sheaf/core/cores.h"
#include "sheaf/tests/distributed/job_scenarios.h"

namespace sheaf {
namespace {

using testing::expect_said;
using testing::last_line;
using testing::run_processes;

TEST(Rendezvous, MissingRankEndsInATimeOutThatNamesIt) {
  const auto results = run_processes(
      {.scenario = "nothing", .ranks = 3, .environment = {"SHEAF_INIT_TIMEOUT=4"}, .absent = {2}});
  for (int r : {0, 1}) {  // whichever gives up first
    EXPECT_EQ(results[r].code, 71) << results[r].output;
    expect_said(results[r], "time-out after 4 s, missing ranks: 2");
  }
}

TEST(Rendezvous, ARankThatMayOpenTooFewFilesSaysSo) {
#ifdef SHEAF_ASAN
  GTEST_SKIP() << "the sanitizer opens files, too, to look at memory";
#endif
  int failed = 0;
  for (int files = 4; files <= 14; ++files) {
    const auto results = run_processes({.scenario = "battery", .ranks = 2,
                                        .environment = {"SHEAF_COMM=gloo", "SHEAF_INIT_TIMEOUT=3", str("FEW_FILES=", files)}});
    if (results[1].code == 0) continue;
    ++failed;
    EXPECT_EQ(results[1].code, 74) << files << ": " << results[1].output;
    EXPECT_TRUE(results[0].code == 72 || results[0].code == 71) << files << ": " << results[0].output;  // 71: it was never heard of
    expect_said(results[1], "Too many open files");
  }
  EXPECT_GE(failed, 3);
}

TEST(Launcher, RunsAJob) {
  for (const std::string kind : {"gloo", "shm"}) {
    const auto r = run_processes({.scenario = "launch/4/axes", .ranks = 1, .environment = {"SHEAF_COMM=" + kind},
                                  .own_variables = false})[0];
    EXPECT_EQ(r.code, 0) << r.output;
    expect_said(r, str("axes ", std::max(1, available_cores() / 4), " threads, ", kind));
  }
}

TEST(Launcher, GivesEachRankCoresOfItsOwn) {
  if (affinity().size() < 2) GTEST_SKIP() << "one core for two ranks";
  const auto r = run_processes({.scenario = "launch/2/pinned", .ranks = 1, .own_variables = false})[0];
  EXPECT_EQ(r.code, 0) << r.output;
}

TEST(Launcher, NamesTheFirstFailureAndReturnsItsCode) {
  struct Case {
    const char *scenario, *line;
    int code;
  };
  for (const Case& c : {Case{"launch/3/kill", "sheaf launch: rank 1 (pid ", 72},
                        Case{"launch/3/throw", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/2/exit", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/2/exit65on1", "sheaf launch: rank 1 (pid ", 65},
                        Case{"launch/3/mismatch", "sheaf launch: rank ", 70}}) {
    const auto r = run_processes({.scenario = c.scenario, .ranks = 1, .own_variables = false})[0];
    EXPECT_EQ(r.code, c.code) << c.scenario << ": " << r.output;
    const std::string line = last_line(r.output);
    EXPECT_TRUE(line.starts_with(c.line)) << line;
    EXPECT_TRUE(line.ends_with(c.code == 72 ? ") was killed by signal 9" : str(") exited with code ", c.code))) << line;
    EXPECT_LT(r.seconds, 20.0) << c.scenario;  // ranks that wait do it for 60 s
  }
}

TEST(Launcher, PassesSignalsOn) {
  const auto r = run_processes({.scenario = "launch/2/wait", .ranks = 1, .own_variables = false,
                                .signal = SIGTERM, .signal_after = "started"})[0];
  EXPECT_EQ(r.code, 128 + SIGTERM);
  EXPECT_EQ(last_line(r.output), "sheaf launch: stopped by signal 15");
}

// A rank that fails during exit, as when a checkpoint cannot be saved, and ranks that had already finished.
TEST(Launcher, ASignalHidesNoFailureAndMakesNone) {
  for (const auto& [scenario, code] : {std::pair{"launch/2/trap74", 74}, {"launch/2/trap0", 0}}) {
    const auto r = run_processes({.scenario = scenario, .ranks = 1, .own_variables = false, .signal = SIGTERM, .signal_after = "ready\nready"})[0];
    EXPECT_EQ(r.code, code) << r.output;
    EXPECT_EQ(r.output.find("stopped by signal") != std::string::npos, code != 0) << r.output;
  }
}

// As under nohup, or in the background of a script (`&`).
TEST(Launcher, IgnoresWhatWasIgnoredWhenItStarted) {
  for (const int signal : {SIGHUP, SIGINT}) {
    const auto previous = std::signal(signal, SIG_IGN);
    const auto r =
        run_processes({.scenario = "launch/3/nap", .ranks = 1, .own_variables = false, .signal = signal, .signal_after = "started"})[0];
    std::signal(signal, previous);
    EXPECT_EQ(r.code, 0) << r.output;
    EXPECT_GT(r.seconds, 2.0);
  }
}

TEST(Launcher, KilledLauncherTakesItsRanksAlong) {
  // The ranks hold the output pipe open as long as they live, so this ends soon only if they die, too.
  const auto start = std::chrono::steady_clock::now();
  const auto r = run_processes({.scenario = "launch/2/wait", .ranks = 1, .own_variables = false,
                                .signal = SIGKILL, .signal_after = "started"})[0];
  EXPECT_EQ(r.code, 128 + SIGKILL);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 30.0);  // they sleep for 60 s
}

TEST(Launcher, RefusesWhatCannotRun) {
  EXPECT_THROW(distributed::launch({.nproc = 0, .threads_per_rank = 0, .command = {"true"}}), ConfigError);
  EXPECT_THROW(distributed::launch({}), ConfigError);
  EXPECT_EQ(distributed::launch({.nproc = 2, .threads_per_rank = 1, .command = {"/no/such/program"}}), 64);
  EXPECT_EQ(distributed::launch({.nproc = 2, .threads_per_rank = 1, .command = {"true"}}), 0);
}

TEST(Launcher, SaysThatItMayOpenTooFewFiles) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{32, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::string said;
  try {
    distributed::launch({.nproc = 64, .threads_per_rank = 1, .pin = false, .command = {"true"}});
  } catch (const IoError& e) {
    said = e.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_NE(said.find("[launch] cannot make a pipe: Too many open files"), std::string::npos) << said;
}

}  // namespace
}  // namespace sheaf
