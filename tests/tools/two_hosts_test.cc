// One job over two hosts: network namespaces with a cable between them, each with its own host name and /dev/shm.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::ContainsRegex;
using testing::expect_same_curve;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Metrics;
using testing::run_sheaf;

using Words = std::vector<std::string>;

constexpr int kRanksPerHost = 2;

std::string read_text(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(folder_ / "corpus.txt") << testing::sample_text(3000);
    const std::string made = "exec 2>'" + folder_ / "why" + "'; ip netns add " + host(0) +
                             " && ip netns add " + host(1) + " && ip link add eth0 netns " +
                             host(0) + " type veth peer name eth0 netns " + host(1) + " && " +
                             up(0) + " && " + up(1) + " && ip netns exec " + host(0) +
                             " unshare --uts --ipc --mount true";
    if (shell(made) != 0)
      GTEST_SKIP() << "not run: no network namespaces here: " << read_text(folder_ / "why");
  }
  void TearDown() override {
    for (int i : {0, 1}) shell("ip netns del " + host(i) + " 2>/dev/null");
  }

  /// All ranks of one job; codes and standard errors, by rank. `meanwhile` runs concurrently.
  struct Job {
    std::vector<int> codes;
    std::vector<std::string> err;
    std::string out;  ///< of rank 0
  };
  template <class F>
  Job run(const Words& arguments, const Words& environment, F&& meanwhile) {
    constexpr int kWorld = 2 * kRanksPerHost;
    std::vector<std::thread> ranks;
    Job job{std::vector<int>(kWorld), std::vector<std::string>(kWorld), ""};
    for (int rank = 0; rank < kWorld; ++rank)
      ranks.emplace_back([&, rank] {
        const std::string files = folder_ / std::to_string(rank);
        std::string command =
            "ip netns exec " + host(rank / kRanksPerHost) +
            " unshare --uts --ipc --mount sh -c 'hostname $0 && mount -t tmpfs none /dev/shm && "
            "exec \"$@\"' host-" +
            std::to_string(rank / kRanksPerHost) +
            " timeout -k 5 120 env SHEAF_DEVICE=cpu MASTER_ADDR=10.11.12.1 RANK=" +
            std::to_string(rank) + " WORLD_SIZE=" + std::to_string(kWorld) +
            " LOCAL_RANK=" + std::to_string(rank % kRanksPerHost) +
            " LOCAL_WORLD_SIZE=" + std::to_string(kRanksPerHost);
        for (const std::string& word : environment) command += " " + word;
        command += " tools/sheaf";
        for (const std::string& word : arguments) command += " '" + word + "'";
        job.codes[rank] = shell(command + " >'" + files + ".out' 2>'" + files + ".err'");
        job.err[rank] = read_text(files + ".err");
      });
    meanwhile();
    for (std::thread& rank : ranks) rank.join();
    job.out = read_text(folder_ / "0.out");
    return job;
  }
  Job run(const Words& arguments, const Words& environment) {
    return run(arguments, environment, [] {});
  }

  Words train(const std::string& out, const std::string& steps) const {
    return {"train",
            "--data.corpus",
            folder_ / "corpus.txt",
            "--output.folder",
            folder_ / out,
            "--train.steps",
            steps,
            "--train.batch",
            "8",
            "--model.layers",
            "2",
            "--model.heads",
            "2",
            "--model.width",
            "18",
            "--model.context",
            "16",
            "--train.eval_tokens",
            "100",
            "--generate.tokens",
            "2",
            "--train.warmup",
            "2"};
  }
  Metrics metrics(const std::string& out) const {
    const std::string path = folder_ / out + "/metrics.jsonl";
    return std::filesystem::exists(path) ? testing::read_metrics(path) : Metrics();
  }
  int cut_the_cable() { return shell("ip -netns " + host(0) + " link set eth0 down"); }

 private:
  static int shell(const std::string& command) {
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  static std::string host(int i) {
    return "sheaf-" + std::to_string(getpid()) + "-" + std::to_string(i);
  }
  static std::string up(int i) {
    const std::string ip = "ip -netns " + host(i);
    return ip + " addr add 10.11.12." + std::to_string(i + 1) + "/24 dev eth0 && " + ip +
           " link set eth0 up && " + ip + " link set lo up";
  }

  ScratchFolder folder_;
};

TEST_F(TwoHosts, TrainAsOneHostDoes) {
  const Job job = run(train("two", "6"), {"SHEAF_TOKEN=secret"});
  for (int code : job.codes) ASSERT_EQ(code, 0) << job.err[0];
  EXPECT_THAT(job.out, HasSubstr("4 ranks (shm+gloo) x 1 thread"));
  EXPECT_THAT(job.out, HasSubstr("(equal)"));  // peaks, which include the communicators' memory
  EXPECT_THAT(job.out, Not(HasSubstr("(DIFFERENT)")));
  const testing::Outcome one = run_sheaf(testing::on_ranks(4, train("one", "6")));
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(one.out, HasSubstr("4 ranks (shm) x 1 thread"));
  EXPECT_EQ(metrics("two").size(), 6u);
  expect_same_curve(metrics("two"), metrics("one"), "two hosts");
}

TEST_F(TwoHosts, ACutCableEndsAllRanksByTheTimeOut) {
  const Job job = run(train("cut", "1000000"), {"SHEAF_TOKEN=secret", "SHEAF_TIMEOUT=3"}, [&] {
    for (int tries = 0; tries < 6000 && metrics("cut").size() < 3; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(cut_the_cable(), 0);
  });
  for (size_t rank = 0; rank < job.codes.size(); ++rank) {
    EXPECT_EQ(job.codes[rank], 71) << job.err[rank];
    // Which ranks each one misses depends on the step it was at.
    EXPECT_THAT(job.err[rank], ContainsRegex("time-out after 3\\.0 s .*missing ranks: "));
  }
}

// A dead host is detected long before a collective times out: data sent to it is not acknowledged.
TEST_F(TwoHosts, ADeadHostIsNoticedInSeconds) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point cut;
  const Job job = run(train("dead", "1000000"), {"SHEAF_TOKEN=secret", "SHEAF_TIMEOUT=120"}, [&] {
    for (int tries = 0; tries < 6000 && metrics("dead").size() < 3; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(cut_the_cable(), 0);
    cut = Clock::now();
  });
  EXPECT_LT(Clock::now() - cut, std::chrono::seconds(60));
  for (size_t rank = 0; rank < job.codes.size(); ++rank) EXPECT_EQ(job.codes[rank], 72) << job.err[rank];
}

TEST_F(TwoHosts, WithoutATokenNobodyStarts) {
  const Job job = run(train("open", "1"), {});
  for (size_t rank = 0; rank < job.codes.size(); ++rank) {
    EXPECT_EQ(job.codes[rank], 64);
    EXPECT_THAT(job.err[rank],
                HasSubstr("beyond loopback: set SHEAF_TOKEN to the same secret on all ranks"));
  }
}

}  // namespace
}  // namespace sheaf
