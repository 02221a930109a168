// `sheaf plan`: the configurations it prints can be run, and agree with `sheaf tape`.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

const Words kModel = {"--model.type", "llama", "--model.layers", "4",  "--model.heads",      "8",  "--model.width", "256",
                      "--model.vocab", "512",  "--model.context", "256", "--model.tie_embeddings", "false",
                      "--train.batch", "16"};

class Plan : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::kHasCuda) GTEST_SKIP() << "estimates are of GPUs, for which this build has no kernels";
  }
};

struct Row {
  double seconds, tokens, mfu, peak, received, waits;
  Words options;
};
std::vector<Row> rows_of(const std::string& out) {
  std::vector<Row> rows;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Row row;
    if (!(words >> row.seconds >> row.tokens >> row.mfu >> row.peak >> row.received >> row.waits)) continue;
    for (std::string word; words >> word;) row.options.push_back(word);
    rows.push_back(row);
  }
  return rows;
}

TEST(PlanWithoutCuda, SaysSo) {
  if (kernels::kHasCuda) GTEST_SKIP() << "this build has CUDA";
  expect_refused(run_sheaf(Words{"plan", "--world", "4"} + kModel), 64, "[plan] configurations are planned for GPUs, and this build has no CUDA");
}

// Each line's options, given to `sheaf tape`, have the line's peak.
TEST_F(Plan, WhatItPrintsCanBeDone) {
  const Outcome all = run_sheaf(Words{"plan", "--world", "4", "--all"} + kModel);
  ASSERT_EQ(all.code, 0) << all.err;
  const Outcome front = run_sheaf(Words{"plan", "--world", "4"} + kModel);
  const auto rows = rows_of(front.out);
  ASSERT_GT(rows.size(), 1u) << front.out;
  EXPECT_GT(rows_of(all.out).size(), rows.size());
  EXPECT_EQ(rows_of(all.out)[0].options, rows[0].options);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i > 0) {
      EXPECT_GE(rows[i].seconds, rows[i - 1].seconds);
      EXPECT_LE(rows[i].peak, rows[i - 1].peak);
    }
    double peak = 0;
    for (const char* rank : {"0", "1", "2", "3"}) {
      const Outcome tape = run_sheaf(Words{"tape", "--device", "cuda", "--world", "4", "--rank", rank} + kModel + rows[i].options);
      ASSERT_EQ(tape.code, 0) << tape.err;
      const size_t at = tape.out.find(": peak ");
      ASSERT_NE(at, std::string::npos);
      peak = std::max(peak, std::stod(tape.out.substr(at + 7)) / 1e9);
    }
    EXPECT_NEAR(rows[i].peak, peak, 0.051) << front.out;
  }
}

TEST_F(Plan, WhatTheCommandLineGivesStays) {
  ScratchFolder folder;
  write_file(folder / "run.toml", "[sharding]\ntensor = 2\nstrategy = \"zero1\"\n");
  const Words file = {"--config", folder / "run.toml"};
  const Outcome kept = run_sheaf(Words{"plan", "--world", "4", "--all", "--sharding.strategy", "shard_grad_op"} + file + kModel);
  ASSERT_EQ(kept.code, 0) << kept.err;
  bool other_tensor = false;
  for (const Row& row : rows_of(kept.out)) {
    const auto at = std::ranges::find(row.options, "--sharding.strategy");
    EXPECT_TRUE(at == row.options.end() || at[1] == "shard_grad_op");
    const auto tensor = std::ranges::find(row.options, "--sharding.tensor");
    ASSERT_NE(tensor, row.options.end()) << "the file says 2, so each line says what it takes";
    other_tensor = other_tensor || tensor[1] != "2";
  }
  EXPECT_TRUE(other_tensor);
}

// A prime number of ranks, and far more ranks than sequences.
TEST_F(Plan, TakesManyRanks) {
  const Outcome prime = run_sheaf(Words{"plan", "--world", "100003"} + kModel);
  ASSERT_EQ(prime.code, 0) << prime.err;
  EXPECT_FALSE(rows_of(prime.out).empty());
}

TEST_F(Plan, WritesATimeLine) {
  ScratchFolder folder;
  const Outcome r = run_sheaf(Words{"plan", "--world", "2", "--trace", folder / "trace.json", "--sharding.pipeline", "2"} + kModel);
  ASSERT_EQ(r.code, 0) << r.err;
  const Json trace = Json::parse(File::open<DataError>(folder / "trace.json").read_all(), "trace");
  int processes = 0, sends = 0;
  for (const Json& e : trace.at("traceEvents").as_array()) {
    processes += e.at("name").as_string() == "process_name";
    sends += e.at("name").as_string() == "send";
  }
  EXPECT_EQ(processes, 2);
  EXPECT_GT(sends, 0);
}

TEST_F(Plan, SaysWhatIsWrong) {
  const auto refused = [](const Words& words, int code, const std::string& what) {
    expect_refused(run_sheaf(Words{"plan"} + kModel + words), code, what);
  };
  refused({"--machine", "h300"}, 64, "h200, h100, a100");
  for (const char* world : {"0", "-1", "1048577", "2147483647", "1000000000000"}) refused({"--world", world}, 64, "--world");
  refused({"--memory", "1000"}, 73, "1000 bytes");
  for (const char* what : {"-1", "0", "nan", "inf"}) {
    refused({"--memory", what}, 64, "--memory");
    refused({"--network", what}, 64, "--network");
  }
  refused({"--ranks-per-host", "0"}, 64, "--ranks-per-host");
  refused({"--train.recompute", "fit", "--sharding.memory_budget", "1000000000"}, 64, "--memory");
  refused({"--world", "3", "--sharding.pipeline", "2"}, 64, "3 ranks");
  refused({"--sharding.tensr", "2"}, 64, "sharding.tensor");
  refused({"--trace", "/no/such/folder/trace.json"}, 74, "/no/such/folder");
  ScratchFolder folder;
  write_file(folder / "trace.json", "of another plan");
  refused({"--memory", "1000", "--trace", folder / "trace.json"}, 73, "1000 bytes");
  EXPECT_EQ(File::open(folder / "trace.json").read_all(), "of another plan");
}

}  // namespace
}  // namespace sheaf::testing
